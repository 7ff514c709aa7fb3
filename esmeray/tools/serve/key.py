"""Make an API key for the service, and add its hash to a file of keys.

The key is printed once and stored nowhere. Scopes are names of models and of endpoints, as in /v1/ENDPOINT; metrics is
an endpoint, too. The service reads the file when it starts.

Examples:
  esmeray serve key --key.name alice --key.file keys.yaml
  esmeray serve key --key.name web --key.file keys.yaml --key.endpoints embeddings \
--key.residues_per_minute 1000000
"""

import yaml

from esmeray.common.errors import ConfigError
from esmeray.common.publishing import write_atomically, writing
from esmeray.service.section import KeySection
from esmeray.tools.grammar import command


@command("serve key", __doc__)
def main(key: KeySection) -> None:
    # Imported here: they load FastAPI and all routes.
    from esmeray.service.http.access import new_key, read_keys
    from esmeray.service.http.app import scopes

    if not {*key.endpoints} <= {"*", *scopes()}:
        raise ConfigError(f"--key.endpoints: use {', '.join(scopes())}, or '*' for all")
    keys = read_keys(key.file) if key.file.exists() else []
    if key.name in {other.name for other in keys}:
        raise ConfigError(f"--key.name {key.name}: {key.file} already has a key with this name; choose another name")
    text, new = new_key(key.name)
    keys.append(new.model_copy(update=key.model_dump(exclude={"name", "file"})))
    # The file has the hash only. This is the only time that the key is available.
    content = yaml.safe_dump([entry.model_dump(exclude_none=True) for entry in keys], sort_keys=False)
    with writing(key.file):
        write_atomically(key.file, content)
        key.file.chmod(0o600)
    print(text)
