"""Settings of the service: models, addresses, limits, and who may call."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from esmeray.cluster.section import RaySection
from esmeray.train_config.section import (
    LINKED_PATH,
    PATH,
    PATH_OR_NAME,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Tokens,
)

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


# Ray counts cores in steps of 0.0001.
Cores = Annotated[float, Field(ge=0.01)]


class ServedModel(Section):
    """Served model and its replicas."""

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
    """Number of replicas; the minimum if max_replicas is set."""
    max_replicas: PositiveInt | None = None
    """Maximum number of replicas. Replicas are added when tokens queue up. Default: replicas."""
    cpus: Cores = 1.0
    """CPU cores of each replica. With 0.5 two replicas share a core; each computes with at least one thread."""
    gpus: PositiveFloat = 1.0
    """GPUs of each replica; with 0.5 two replicas share a GPU."""
    tokens: Tokens | None = None
    """Token budget of a batch. Default: 2,048 on the CPU, 65,536 on CUDA."""
    equal_bytes: bool = False
    """On the CPU, return the same bits whatever else is in the batch, as embed run does. A single protein then takes
    two to ten times as long."""
    max_wait_ms: NonNegativeFloat = 2.0
    """Maximum time in milliseconds that a batch waits to be filled."""
    queue_tokens: PositiveInt = 500_000
    """Tokens that may wait for a replica; further requests are refused with 429."""
    queue_s: PositiveFloat = 5.0
    """Seconds of computing that may wait for a replica, if that is less than queue_tokens. Two batches may always
    wait."""
    cache_mb: NonNegativeInt = 256
    """Memory in MB for cached results."""
    cache: Annotated[str | None, PATH] = None
    """Folder of embed's cache, which the service only reads. Default: none."""


class ServedIndex(Section):
    """Served index and its replicas."""

    name: ModelName
    """Name of the index in requests."""
    source: Annotated[str, PATH]
    """Folder or URI of an index that embed index has built from vectors of a served model."""
    model: ModelName | None = None
    """Name of the served model that made its vectors. Default: the first."""
    link: Annotated[str, Field(pattern=r"^https?://.*\{id\}")] | None = None
    """Address of a neighbour's page, with {id} for its id, to which the page links. Default: UniProt's for ids that are
    its accessions."""
    probes: PositiveInt | None = None
    """Clusters of a compressed index that are searched for a query. Default: 32."""
    replicas: PositiveInt = 1
    """Number of replicas. Replicas on the same machine share the memory of the index's files."""
    cpus: Cores = 1.0
    """CPU cores of each replica. With 0.5 two replicas share a core; each computes with at least one thread."""
    queue_s: PositiveFloat = 5.0
    """Seconds of searching that may wait for a replica; further requests are refused with 429."""


class LimitsSection(Section):
    """Limits of requests. A request that exceeds one is refused with 413, 422, 429, 503 or 504."""

    sequences: PositiveInt = 1024
    """Maximum number of sequences of a request."""
    sequence_residues: PositiveInt = 50_000
    """Maximum number of residues of a sequence."""
    residues: PositiveInt = 200_000
    """Maximum number of residues of all sequences of a request."""
    mutations: PositiveInt = 50_000
    """Maximum number of mutations of a request."""
    neighbours: PositiveInt = 20_000
    """Maximum number of neighbours of a search, of all its sequences together."""
    body_bytes: PositiveInt = 16_000_000
    """Maximum number of bytes of a request's body. All bodies in an ingress replica at once have at most four times as
    many; bodies of up to 64 kB are accepted beyond this."""
    timeout_s: PositiveFloat = 120.0
    """Maximum time in seconds until a request is answered."""


class AccessSection(Section):
    """API keys and TLS."""

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
    """Models to serve, each a folder, a run or a hub name. In a file each may have its own settings. The first is the
    default."""
    indexes: list[ServedIndex] = Field(default=[])
    """Indexes to search, each a folder or a URI. In a file each may have its own settings. The first is the default."""
    random_weights: bool = False
    """Accept sizes (esm2_t6_8M) among models given by name only; their weights are random, to try the service out."""
    host: str = "127.0.0.1"
    """Address of this machine to listen on."""
    port: Annotated[int, Field(gt=0, le=65535)] = 8000
    """Port to listen on."""
    ingress_replicas: PositiveInt = 1
    """Number of processes that check and parse requests."""
    startup_hook: str | None = None
    """Function MODULE:NAME that is called with the FastAPI application, to add OpenTelemetry or other middleware."""
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()

    @property
    def served(self) -> list[ServedModel | ServedIndex]:
        """Models and indexes; each is a deployment with its name."""
        return [*self.models, *self.indexes]

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Models with their own settings have their own random_weights.
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
            # Otherwise a refusal would name a limit that does not apply.
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
    """Models that the key may use; '*' for all models."""
    endpoints: list[str] = Field(default=["*"])
    """Endpoints that the key may use, e.g. embeddings or classify; '*' for all endpoints."""
    requests_per_minute: PositiveInt | None = None
    """Maximum number of requests per minute. Default: no limit."""
    residues_per_minute: PositiveInt | None = None
    """Maximum number of residues per minute. Default: no limit."""


class KeySection(CallerSection):
    """New key: its name, scopes, rates, and the file of keys."""

    file: Path
    """YAML file of keys, which is created if it does not exist."""


class QuerySection(Section):
    """Query of a service: sequences, address, and output file."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders or globs."""
    output: Path
    """File to write: .parquet for embeddings, .tsv for the classes of a classifier."""
    # Any name, since the service may have outputs that this machine does not know; it refuses unknown ones.
    task: str = "mean"
    """Requested output of the model for a Parquet file, e.g. mean or residues. GET /v1/models lists the outputs."""
    model: str | None = None
    """Name of the model in the service. Default: the service's first."""
    address: str = "http://127.0.0.1:8000"
    """Address of the service, e.g. http://HOST:8000."""
    key_file: Path | None = None
    """File with the API key. Default: ESMERAY_KEY, if set."""


def _name(source: str) -> str:
    """Return the name of a folder or a hub model."""
    path = Path(source)
    # The export of a run is a folder in the run, which has the name.
    return path.parent.name if path.name == "export" else path.name


def is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # another name may resolve to any address, and to another one tomorrow
