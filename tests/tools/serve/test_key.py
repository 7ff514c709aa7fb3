"""``esmeray serve key`` adds the hash of a key to a file readable only by its owner, and prints the key once."""

from pathlib import Path

from esmeray.service.http.access import Access, read_keys


def test_keys_are_added_and_verify(command, tmp_path: Path):
    file = tmp_path / "keys.yaml"
    first = command("serve", "key", "--key.name", "alice", "--key.file", file)
    options = ["--key.endpoints", "embeddings", "--key.models", "esm", "--key.residues_per_minute", "1000"]
    second = command("serve", "key", "--key.name", "web", "--key.file", file, *options)
    assert (first.code, second.code) == (0, 0) and first.out.count("\n") == second.out.count("\n") == 1
    assert file.stat().st_mode & 0o777 == 0o600
    keys = [outcome.out.strip().removeprefix("esm-") for outcome in (first, second)]
    assert not any(key in file.read_text() for key in keys), "their hashes are kept alone"
    access = Access(read_keys(file))
    alice, web = (access.key_of("/v1/encode", f"Bearer {outcome.out.strip()}") for outcome in (first, second))
    assert (alice.name, alice.endpoints, alice.residues_per_minute) == ("alice", ["*"], None)
    assert (web.name, web.endpoints, web.models, web.residues_per_minute) == ("web", ["embeddings"], ["esm"], 1000)


def test_mistakes_are_one_line_and_leave_the_file(command, tmp_path: Path):
    file = tmp_path / "keys.yaml"
    for content, options, words in [
        ("- {name: a, sha256: '%s'}" % ("0" * 64), "--key.name a", "already has a key with this name"),
        ("a: 1", "--key.name b", "is not a list of keys"),
        ("", "--key.name a --key.requests_per_minute 0", "--key.requests_per_minute"),
        ("", "--key.name a --key.endpoints embedings", "--key.endpoints"),
    ]:
        file.write_text(content)
        outcome = command.refused(2, words, f"serve key --key.file {file} {options}")
        assert outcome.out == "" and file.read_text() == content
