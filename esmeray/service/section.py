"""Settings of the service: models, addresses, limits, and who may call."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from esmeray.cluster.section import RaySection
from esmeray.train_config.natures import LINKED_PATH, PATH, PATH_OR_NAME
from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Tokens

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


# Ray counts cores in steps of 0.0001.
Cores = Annotated[float, Field(ge=0.01)]


class ServedModel(Section):
    """A model, and the replicas that compute with it."""

    name: ModelName
    """Name of the model in requests."""
    source: Annotated[str, PATH_OR_NAME]
    """Folder or hub name of a transformers model, an Esmeray run, or its export."""
    random_weights: bool = False
    """Accept a size (esm2_t6_8M) as source; its weights are random, to try the service out."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision in which the model computes. Default: bf16; fp32 for classifiers, and if the processor of a node has no
    instructions for bf16."""
    device: Literal["cpu", "cuda"] | None = None
    """cpu or cuda. Default: CUDA where the cluster has a GPU."""
    replicas: PositiveInt = 1
    """Number of replicas; the smallest number where max_replicas is set."""
    max_replicas: PositiveInt | None = None
    """Largest number of replicas, which are started as tokens queue up. Default: replicas."""
    cpus: Cores = 1.0
    """CPU cores of each replica. With 0.5 two replicas share a core; each computes with at least one thread."""
    gpus: PositiveFloat = 1.0
    """GPUs of each replica; with 0.5 two replicas share a GPU."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    equal_bytes: bool = False
    """On the CPU, answer with the same bits whatever shares a batch, as embed run does: a lone protein then takes two
    to ten times as long."""
    max_wait_ms: NonNegativeFloat = 2.0
    """Milliseconds that a batch waits to be filled, at most."""
    queue_tokens: PositiveInt = 500_000
    """Tokens that may wait for a replica; further requests are refused with 429."""
    queue_s: PositiveFloat = 5.0
    """Seconds of computing that may wait for a replica, if fewer tokens than queue_tokens; two batches may always
    wait."""
    cache_mb: NonNegativeInt = 256
    """Memory in MB for results of sequences that were computed before."""
    cache: Annotated[str | None, PATH] = None
    """Folder of embed's cache, which is only read. Default: none."""


class ServedIndex(Section):
    """An index, and the replicas that search it."""

    name: ModelName
    """Name of the index in requests."""
    source: Annotated[str, PATH]
    """Folder or URI of an index of vectors by a served model, as embed index makes it."""
    model: ModelName | None = None
    """Name of the served model that made its vectors. Default: the first."""
    link: Annotated[str, Field(pattern=r"^https?://.*\{id\}")] | None = None
    """Address of a neighbour's page, with {id} for its id, to which the page links. Default: UniProt's for ids that are
    its accessions."""
    probes: PositiveInt | None = None
    """Clusters of a compressed index that are searched for a query. Default: 32."""
    replicas: PositiveInt = 1
    """Number of replicas; those of a machine share the pages of the index's files."""
    cpus: Cores = 1.0
    """CPU cores of each replica. With 0.5 two replicas share a core; each computes with at least one thread."""
    queue_s: PositiveFloat = 5.0
    """Seconds of searching that may wait for a replica; further requests are refused with 429."""


class LimitsSection(Section):
    """Limits of requests. A request that exceeds one is refused with 413, 422, 429, 503 or 504."""

    sequences: PositiveInt = 1024
    """Sequences of a request, at most."""
    sequence_residues: PositiveInt = 50_000
    """Residues of a sequence, at most."""
    residues: PositiveInt = 200_000
    """Residues of all sequences of a request, at most."""
    mutations: PositiveInt = 50_000
    """Mutations of a request to score, at most."""
    neighbours: PositiveInt = 20_000
    """Neighbours of all sequences of a search together, at most."""
    body_bytes: PositiveInt = 16_000_000
    """Bytes of a request's body, at most. An ingress replica holds at most four times as many of all bodies at once;
    bodies of up to 64 kB are accepted beyond this."""
    requests: PositiveInt = 512
    """Requests that an ingress replica answers at once, at most."""
    timeout_s: PositiveFloat = 120.0
    """Seconds until a request is answered, at most."""


class AccessSection(Section):
    """Callers, and the encryption of what they send."""

    keys: Annotated[str | None, LINKED_PATH] = None
    """YAML file of API keys, as 'esmeray serve key' writes it. Default: none; host must then be a loopback
    address."""
    tls_certificate: str | None = None
    """File with the certificate, in PEM. Together with tls_key it turns on HTTPS."""
    tls_key: str | None = None
    """File with the certificate's private key, in PEM."""


class ServeSection(Section):
    """The service."""

    models: list[ServedModel] = Field(min_length=1)
    """Models to serve, each a folder, a run or a hub name; in a file each may have settings of its own. The first is
    the default."""
    indexes: list[ServedIndex] = Field(default=[])
    """Indexes to search, each a folder or a URI; in a file each may have settings of its own. The first is the
    default."""
    random_weights: bool = False
    """Accept sizes (esm2_t6_8M) among models given by name alone; their weights are random, to try the service out."""
    host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    port: Annotated[int, Field(gt=0, le=65535)] = 8000
    """Port to listen on."""
    ingress_replicas: PositiveInt = 1
    """Processes that check and parse requests."""
    startup_hook: str | None = None
    """Function MODULE:NAME that is called with the FastAPI application, to add OpenTelemetry or other middleware."""
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()

    @property
    def served(self) -> list[ServedModel | ServedIndex]:
        """Models and indexes, each a deployment of its name."""
        return [*self.models, *self.indexes]

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Models with settings of their own say themselves whether they are sizes.
        random = {"random_weights": values.get("random_weights", False)}
        named = dict(values)
        for key, more in ("models", random), ("indexes", {}):
            if isinstance(values.get(key), list):
                named[key] = [
                    {"name": _name(source), "source": source, **more} if isinstance(source, str) else source
                    for source in values[key]
                ]
        return named

    @model_validator(mode="after")
    def _consistent(self) -> "ServeSection":
        names = [served.name for served in self.served]
        known = [None, *(model.name for model in self.models)]
        wrong = [
            (len(set(names)) < len(names), "models, indexes: two have the same name; rename one"),
            *(
                (index.model not in known, f"indexes: {index.name}: model {index.model} is not among models")
                for index in self.indexes
            ),
            *(
                (
                    model.replicas > (model.max_replicas or model.replicas),
                    f"models: {model.name}: max_replicas is less than replicas",
                )
                for model in self.models
            ),
            (
                self.access.keys is None and not is_loopback(self.host),
                f"host {self.host}: without access.keys the service listens on 127.0.0.1 alone; make keys with "
                "'esmeray serve key', or choose 127.0.0.1",
            ),
            (
                (self.access.tls_certificate is None) != (self.access.tls_key is None),
                "access: tls_certificate and tls_key go together",
            ),
            # Or a refusal would name a limit that no request can keep to.
            (
                self.limits.sequence_residues > self.limits.residues,
                "limits.sequence_residues is more than limits.residues",
            ),
        ]
        for is_so, problem in wrong:
            if is_so:
                raise ValueError(problem)
        return self


class ServiceSettings(Section):
    """The service and its cluster."""

    serve: ServeSection
    ray: RaySection = RaySection()


class CallerSection(Section):
    """Rights of a key's caller."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the key, which logs show."""
    models: list[str] = Field(default=["*"])
    """Models that the key may use; '*' for all."""
    endpoints: list[str] = Field(default=["*"])
    """Endpoints that the key may use, as embeddings or classify; '*' for all."""
    requests_per_minute: PositiveInt | None = None
    """Requests a minute that the key may send. Default: any number."""
    residues_per_minute: PositiveInt | None = None
    """Residues a minute that the key may send. Default: any number."""


class KeySection(CallerSection):
    """A key's name, scopes and rates, and its file."""

    file: Path
    """YAML file of keys, made if it is missing."""


class QuerySection(Section):
    """Sequences, the service, and the file to write."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders or globs."""
    output: Path
    """File to write the answers to."""
    # No list of outputs: the service's machine may have others than this one, and it refuses what it does not have.
    task: str = "mean"
    """Output of the model that is asked for, as mean or residues, or classify. GET /v1/models lists the outputs."""
    model: str | None = None
    """Model that answers, by its name in the service. Default: the service's first."""
    address: str = "http://127.0.0.1:8000"
    """Address of the service, as http://HOST:8000."""
    key_file: Path | None = None
    """File with the API key. Default: ESMERAY_KEY, if set."""
    concurrency: PositiveInt = 8
    """Requests that are sent at once."""


def _name(source: str) -> str:
    """The folder's or the hub model's own name."""
    path = Path(source)
    # A run's export lies below the run, which has the name.
    return path.parent.name if path.name == "export" else path.name


def is_loopback(host: str) -> bool:
    """Test for a loopback address or its name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # another name may stand for any address, and for another one tomorrow
