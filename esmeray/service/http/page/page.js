// The page: sequences to a model, and its answer as bars, a heat map, a map of proteins or a table of neighbours.
const byId = (id) => document.getElementById(id);
const TASKS = {
  classify: {name: "Classes", output: "classes", path: "v1/classify", draw: drawClasses},
  masked: {name: "Residue probabilities and mutations", output: "masked", path: "v1/masked", draw: drawHeatMap},
  embeddings: {name: "Map of proteins", output: "mean", path: "v1/embeddings", draw: drawMap},
};
const EXAMPLE = `>insulin_human
FVNQHLCGSHLVEALYLVCGERGFFYTPKT
>insulin_pig
FVNQHLCGSHLVEALYLVCGERGFFYTPKA
>ubiquitin
MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG
>lysozyme
KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPCSALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL
`;
let models = [], asked = null, answer = null;

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "circle", "title", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function table(caption, heads, rows) {
  const cells = (kind, row) => element("tr", {}, ...row.map((cell) => element(kind, {}, cell)));
  return element("table", {}, element("caption", {}, caption), cells("th", heads), ...rows.map((row) => cells("td", row)));
}

async function call(path, options = {}) {
  const key = byId("key").value;
  const headers = {...options.headers, ...(key && {Authorization: `Bearer ${key}`})};
  const response = await fetch(path, {...options, headers});
  if (response.ok) return response;
  byId("key-label").hidden &&= response.status !== 401;
  const problem = await response.json().catch(() => ({}));
  throw new Error(problem.detail || `the service answers ${response.status}`);
}

function records() {
  const text = byId("fasta").value.trim();
  if (!text.startsWith(">")) {
    return text.split(/\s*\n\s*/).filter(Boolean).map((sequence, n) => ({id: `sequence ${n + 1}`, sequence}));
  }
  return text.slice(1).split(/\n>/).map((part, n) => {
    const [header, ...lines] = part.split("\n");
    return {id: header.trim().split(/\s+/)[0] || `sequence ${n + 1}`, sequence: lines.join("").replace(/\s/g, "")};
  });
}

function body(task) {
  const sequences = records();
  const common = {model: byId("model").value};
  if (TASKS[task].index) return {index: TASKS[task].index.name, sequences};
  return task === "embeddings" ? {...common, input: sequences} : {...common, sequences};
}

const post = (path, content, accept = "application/json") =>
  call(path, {method: "POST", headers: {"Content-Type": "application/json", Accept: accept}, body: JSON.stringify(content)});

function say(text, error = false) {
  byId("status").textContent = text;
  byId("status").className = error ? "error" : "";
}

async function run(event) {
  event.preventDefault();
  const task = byId("task").value, content = body(task);
  if (!records().length) return say("Paste a sequence first.", true);
  say("computing ...");
  const start = performance.now();
  let unknown = null;
  try {
    const response = await post(TASKS[task].path, content);
    unknown = response.headers.get("x-unknown-residues");
    answer = await response.json();
  } catch (error) {
    byId("results").hidden = true;
    return say(error.message, true);
  }
  asked = {task, content, records: records()};
  say(`${asked.records.length} sequences in ${((performance.now() - start) / 1000).toFixed(2)} s${unknown ? `; ${unknown}` : ""}`);
  byId("which").replaceChildren(...asked.records.map((record, n) => element("option", {value: n}, record.id)));
  byId("results").hidden = false;
  show();
  byId("results").focus();
}

function show() {
  const one = Number(byId("which").value || 0);
  byId("which-label").hidden = asked.task === "embeddings" && asked.records.length < 2;
  byId("picture").replaceChildren(...TASKS[asked.task].draw(one));
}

function drawClasses(one) {
  const {label, probabilities, cropped} = answer.data[one];
  const note = cropped ? ` (${cropped} residues beyond the model's length are left out)` : "";
  if (answer.kind === "per_residue") {
    const letters = label.split("").map((letter, n) => element("span", {title: `residue ${n + 1}`}, letter));
    return [element("h2", {}, `Class of each residue${note}`), element("p", {class: "scroll"}, ...letters)];
  }
  const ranked = answer.labels.map((name, n) => [name, probabilities[n]]).sort((a, b) => b[1] - a[1]).slice(0, 25);
  const rows = ranked.map(([name, value]) => element("tr", {}, element("th", {scope: "row"}, name),
    element("td", {class: "bar", "aria-hidden": "true"}, element("span", {style: `width:${100 * Math.min(1, Math.abs(value))}%`})),
    element("td", {}, answer.kind === "regression" ? value.toPrecision(4) : `${(100 * value).toFixed(1)} %`)));
  const caption = answer.kind === "regression" ? "Values" : "Probabilities of the classes";
  return [element("h2", {}, `${asked.records[one].id}: ${[label ?? []].flat().join(", ") || "no class above 50 %"}${note}`),
    element("table", {}, element("caption", {}, caption), ...rows)];
}

function drawHeatMap(one) {
  const {probabilities} = answer.data[one], letters = answer.letters, size = 14;
  const sequence = asked.records[one].sequence.toUpperCase().replace(/\*$/, "");
  const score = (place, column) => {
    const wild = letters.indexOf(sequence[place]);
    return wild < 0 ? null : Math.log(probabilities[place][column] / probabilities[place][wild]);
  };
  const mutations = [];
  const canvas = element("canvas", {width: 24 + size * sequence.length, height: 34 + size * letters.length, role: "img",
    "aria-label": "Heat map of residue probabilities; the table below has the best mutations"});
  const pen = canvas.getContext("2d");
  pen.font = "11px system-ui, sans-serif";
  for (let row = 0; row < letters.length; row++) {
    pen.fillStyle = "#1f2933";
    pen.fillText(letters[row], 6, 29 + size * row);
    for (let place = 0; place < sequence.length; place++) {
      pen.fillStyle = colour(Math.sqrt(probabilities[place][row]));
      pen.fillRect(20 + size * place, 18 + size * row, size - 1, size - 1);
      const value = score(place, row);
      if (value !== null && letters[row] !== sequence[place]) mutations.push([place, row, value]);
    }
  }
  pen.strokeStyle = pen.fillStyle = "#1f2933";
  for (let place = 0; place < sequence.length; place++) {
    const row = letters.indexOf(sequence[place]);
    if (row >= 0) pen.strokeRect(20.5 + size * place, 18.5 + size * row, size - 2, size - 2);
    if (place % 10 === 9) pen.fillText(place + 1, 14 + size * place, 12);
  }
  mutations.sort((a, b) => b[2] - a[2]);
  const hover = element("p", {"aria-hidden": "true"}, "Point at a cell to see its probability.");
  canvas.onmousemove = (event) => {
    const place = Math.floor((event.offsetX - 20) / size), row = Math.floor((event.offsetY - 18) / size);
    const known = probabilities[place]?.[row];
    if (known !== undefined) hover.textContent = `${sequence[place]}${place + 1} to ${letters[row]}: ${(100 * known).toFixed(2)} %`;
  };
  const name = ([place, row]) => `${sequence[place]}${place + 1}${letters[row]}`;
  const best = mutations.slice(0, 10).map((each) => [name(each), each[2].toFixed(3)]);
  const text = mutations.length ? `Best mutation: ${best[0][0]}, score ${best[0][1]}` : "No position has a known residue";
  return [element("h2", {}, `${asked.records[one].id}. ${text}`), element("div", {class: "scroll"}, canvas), hover,
    element("p", {}, "Dark is likely; framed is the sequence. The score is log p(mutant) - log p(wild type)."),
    table("Best mutations", ["mutation", "score"], best)];
}

function colour(share) {  // white to dark blue
  const mix = (from, to) => Math.round(from + (to - from) * share);
  return `rgb(${mix(247, 8)},${mix(251, 48)},${mix(255, 107)})`;
}

function drawMap(one) {
  const vectors = answer.data.map((each) => each.embedding), width = 900, height = 420;
  const norm = (v) => Math.sqrt(v.reduce((sum, x) => sum + x * x, 0)) || 1;
  const cosine = (a, b) => a.reduce((sum, x, n) => sum + x * b[n], 0) / norm(a) / norm(b);
  const near = vectors.map((v, n) => [n, cosine(vectors[one], v)]).filter(([n]) => n !== one)
    .sort((a, b) => b[1] - a[1]).slice(0, 5);
  const neighbours = table("Nearest by cosine", ["protein", "cosine"], near.map(([n, c]) => [asked.records[n].id, c.toFixed(4)]));
  if (vectors.length < 3) return [element("h2", {}, asked.records[one].id), neighbours];
  const points = components(vectors);
  const scale = (k, size, margin) => {  // of the names, right of the points
    const values = points.map((p) => p[k]), low = Math.min(...values), span = Math.max(...values) - low || 1;
    return (p) => 20 + (size - 20 - margin) * (p[k] - low) / span;
  };
  const x = scale(0, width, 140), y = scale(1, height, 20), close = new Set(near.map(([n]) => n));
  const picture = element("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": "Map of the proteins by the first two principal components"});
  points.forEach((point, n) => {
    const kind = n === one ? "chosen" : close.has(n) ? "near" : "";
    const dot = element("circle", {cx: x(point), cy: y(point), r: 6, class: kind, tabindex: 0, role: "button",
      "aria-label": asked.records[n].id}, element("title", {}, asked.records[n].id));
    dot.onclick = () => { byId("which").value = n; show(); byId("picture").querySelector(".chosen").focus(); };
    dot.onkeydown = (event) => { if (["Enter", " "].includes(event.key)) { event.preventDefault(); dot.onclick(); } };
    picture.append(dot);
    if (points.length < 40) picture.append(element("text", {x: x(point) + 8, y: y(point) + 4}, asked.records[n].id));
  });
  return [element("h2", {}, `${asked.records[one].id} and its neighbours`), element("div", {class: "scroll"}, picture), neighbours];
}

// As in sp|P12345|NAME of UniProt's files, or alone.
const ACCESSION = /^(?:(?:sp|tr)\|)?([OPQ]\d[A-Z\d]{3}\d|[A-NR-Z]\d(?:[A-Z][A-Z\d]{2}\d){1,2})(?:$|\|)/;

export function linked(id, template) {
  const accession = ACCESSION.exec(id)?.[1];
  const href = template ? template.replace("{id}", encodeURIComponent(id)) : `https://www.uniprot.org/uniprotkb/${accession}`;
  return template || accession ? element("a", {href, target: "_blank", rel: "noreferrer"}, id) : id;
}

function drawNeighbours(one) {
  const {index} = TASKS[asked.task], {neighbours} = answer.data[one];
  const rows = neighbours.map(({rank, id, score}) => [String(rank), linked(id, index.link), score.toFixed(4)]);
  return [element("h2", {}, `${asked.records[one].id} and its neighbours`),
    table(`Nearest of ${index.vectors.toLocaleString("en")} proteins`, ["rank", "protein", answer.metric], rows)];
}

function components(vectors) {  // the first two principal components, by power iteration
  const mean = vectors[0].map((_, d) => vectors.reduce((sum, v) => sum + v[d], 0) / vectors.length);
  const centred = vectors.map((v) => v.map((x, d) => x - mean[d])), axes = [];
  const dot = (a, b) => a.reduce((sum, x, d) => sum + x * b[d], 0);
  for (let k = 0; k < 2; k++) {
    let axis = mean.map((_, d) => Math.sin(1 + d + k));
    for (let step = 0; step < 60; step++) {
      const next = mean.map(() => 0);
      for (const v of centred) { const share = dot(v, axis); v.forEach((x, d) => { next[d] += share * x; }); }
      for (const other of axes) { const share = dot(next, other); other.forEach((x, d) => { next[d] -= share * x; }); }
      const size = Math.sqrt(dot(next, next)) || 1;
      axis = next.map((x) => x / size);
    }
    axes.push(axis);
  }
  return centred.map((v) => axes.map((axis) => dot(v, axis)));
}

async function download(kind) {
  const {task, content} = asked;
  try {
    let blob;
    if (kind === "csv" && (task === "masked" || answer.kind === "per_residue")) {
      const heads = ["id", "position", ...(answer.letters || answer.labels)];
      const rows = answer.data.flatMap(({id, probabilities}) => probabilities.map((row, n) => [id, n + 1, ...row]));
      // Ids and classes may have commas, quotes and line breaks.
      const quoted = (cell) => typeof cell === "string" ? `"${cell.replaceAll('"', '""')}"` : cell;
      blob = new Blob([[heads, ...rows].map((row) => row.map(quoted).join()).join("\n")], {type: "text/csv"});
    } else {
      const accept = kind === "csv" ? "text/csv" : "application/vnd.apache.parquet";
      blob = await (await post(TASKS[task].path, content, accept)).blob();
    }
    const link = element("a", {href: URL.createObjectURL(blob), download: `${task}.${kind}`});
    link.click();
    URL.revokeObjectURL(link.href);
  } catch (error) { say(error.message, true); }
}

function chooseModel() {
  const model = models.find(({id}) => id === byId("model").value);
  const searches = model.indexes.map((index) => [`search-${index.name}`,
    {name: `Neighbours in ${index.name}`, index, path: "v1/search", draw: drawNeighbours}]);
  Object.assign(TASKS, Object.fromEntries(searches));
  const tasks = [...Object.entries(TASKS).filter(([, task]) => task.output in model.outputs), ...searches];
  byId("task").replaceChildren(...tasks.map(([key, task]) => element("option", {value: key}, task.name)));
  const weights = model.random_weights ? "random weights: its answers mean nothing" : "trained weights";
  byId("about").textContent = `${weights}; ${model.device}, ${model.precision}`;
}

async function live() {
  let before = null;
  for (;;) {
    try {
      const text = await (await call("metrics")).text(), now = performance.now();
      const sum = (name) => [...text.matchAll(new RegExp(`^${name}({.*})? (\\S+)$`, "gm"))].reduce((all, m) => all + Number(m[2]), 0);
      const seen = {now, tokens: sum("esmeray_replica_tokens"), count: sum("esmeray_request_seconds_count"),
        seconds: sum("esmeray_request_seconds_sum"), queued: sum("esmeray_replica_queued_tokens")};
      if (before) {
        const rate = 1000 * (seen.tokens - before.tokens) / (seen.now - before.now);
        const requests = seen.count - before.count, mean = requests ? 1000 * (seen.seconds - before.seconds) / requests : 0;
        byId("live").textContent = `${Math.round(rate).toLocaleString("en")} tokens/s, ${mean.toFixed(0)} ms a request, ` +
          `${seen.queued.toLocaleString("en")} tokens waiting`;
      }
      before = seen;
    } catch (error) { byId("live").textContent = "no metrics"; }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function start() {
  try {
    models = (await (await call("v1/models")).json()).data;
    byId("model").replaceChildren(...models.map(({id}) => element("option", {value: id}, id)));
    chooseModel();
    say("");
  } catch (error) { say(error.message, true); }
}

async function take(file) { if (file) byId("fasta").value = await file.text(); }

byId("form").onsubmit = run;
byId("model").onchange = chooseModel;
byId("which").onchange = show;
byId("key").onchange = start;
byId("example").onclick = () => { byId("fasta").value = EXAMPLE; };
byId("file").onchange = (event) => take(event.target.files[0]);
byId("csv").onclick = () => download("csv");
byId("parquet").onclick = () => download("parquet");
byId("fasta").ondragover = (event) => { event.preventDefault(); event.target.classList.add("over"); };
byId("fasta").ondragleave = (event) => event.target.classList.remove("over");
byId("fasta").ondrop = (event) => { event.preventDefault(); event.target.classList.remove("over"); take(event.dataTransfer.files[0]); };
start();
live();
