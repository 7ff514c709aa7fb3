"""Token ids by Hugging Face's fast tokenizers, from a local folder or the hub, without running remote code.

Ids are the same as with transformers' ``AutoTokenizer``. ProtTrans models (ProtBERT, ProtT5; Elnaggar et al. 2021) have
one word per residue. They need upper case, blanks between residues, and X for U, Z, O and B, as their model cards say.
transformers and tokenizers are imported on use, because loader processes don't need them.

Shape legend: N texts, T tokens of all texts.
"""

import copy
import hashlib
import itertools
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.command_line import warn
from esmeray.common.errors import ConfigError, first_line
from esmeray.common.publishing import verified
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, GAPS, MASK_TEXT, STORE_ALPHABET, UnknownLetters
from esmeray.dataset.tokens.esm import sequence_lengths
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, quiet_transformers, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE_KEY = "model.backbone.source"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "*.model")
TOKENIZER_PATTERNS = (
    *(CONFIG_FILE, TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *_VOCABULARY_FILES,
)
_SPACED_KEY = "esmeray_spaced"
"""Key that :meth:`HuggingFaceTokenizer.save` adds to tokenizer_config.json; other readers ignore it."""

_RARE_TO_X = str.maketrans("UZOB", "XXXX")
_LETTERS = string.ascii_uppercase + GAPS
"""Letters that a sequence may have if it does not come from a store."""
_MASKED = "\0"
"""Stand-in for :data:`MASK_TEXT` in the table lookup: one character for one token."""
_ROLES = {"unk": "unk", "cls": "cls|bos|s|start", "sep": "sep|eos|/s|end|stop", "pad": "pad", "mask": "mask"}
"""Names of special tokens in vocabularies, without brackets, by their role in BERT."""
_WORD_MARKS = ("▁", "Ġ", "##")
"""Word marks that sentencepiece, byte-level BPE and WordPiece put before a token."""


class HuggingFaceTokenizer:
    """A fast tokenizer of transformers (``TokenizersBackend``) whose special tokens do not depend on the text.

    Attributes:
        spaced: put blanks between the characters of a text, in upper case, with X for U, Z, O and B.
        fingerprint: hex; equal for tokenizers that give equal ids.
        prefix, suffix: ids before and after every sequence.
        pad: id that fills padded batches; attention ignores it.
        unknown: id of the unknown token, or None if the vocabulary covers all text.
        mask: id of a masked residue, or None if the vocabulary has none.
        vocabulary_size: the largest id plus 1.
        one_token_per_residue: True if a protein of L residues always gives L tokens. The vocabulary then has the 20
            amino acids; any other letter that it lacks is one unknown token.
        known: letters that have a token.
        unknown_letters: the other letters of a clean sequence, and the text of the unknown token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", spaced: bool) -> None:
        self.spaced = spaced
        self._tokenizer: Any = tokenizer
        # A copy without truncation and padding, so that saving keeps the original settings.
        self._backend: Any = copy.deepcopy(self._tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = self._tokenizer.split_special_tokens
        self.prefix, self.suffix = _around(self._backend)
        model = self._tokenizer.backend_tokenizer.model
        # Byte-level vocabularies cover all text, even if the configuration names an unknown token.
        knows_all = type(model).__name__ == "BPE" and model.unk_token is None
        self.unknown: int | None = None if knows_all else self._tokenizer.unk_token_id
        # The padding token, or another one without text; attention ignores it.
        padding = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        self.pad = next(int(index) for index in padding if index is not None)
        self.mask: int | None = getattr(self._tokenizer, "mask_token_id", None)
        # Skip the empty token, which comes from a blank last line in a vocabulary file.
        self.vocabulary_size = max(index for token, index in self._tokenizer.get_vocab().items() if token) + 1
        # If the vocabulary has no X, keep the rare letters, which it may have.
        self._rare_to_x = _RARE_TO_X
        if not self.knows("X"):
            self._rare_to_x = {}
        self.known = "".join(filter(self.knows, _LETTERS))
        self._table = self._residue_table() if _has_single_letters(self._tokenizer) else None
        self.one_token_per_residue = self._table is not None
        letters = "".join(sorted({*STORE_ALPHABET} - {*self.known})) if self.one_token_per_residue else ""
        self.unknown_letters = UnknownLetters(letters, "" if self.unknown is None else str(self._tokenizer.unk_token))
        # Everything that ids depend on, without names: equal tokenizers in two folders share the tokens of a store.
        settings = [self._backend.to_str(), self.prefix, self.suffix, spaced, self._backend.encode_special_tokens]
        settings += letters  # the table maps these letters to the unknown token, which the file does not say
        self.fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of N texts, concatenated, (T,), without prefix and suffix, and the number per text, (N,).

        Raises DataError for a letter that is not in the vocabulary, if there is no unknown token.
        """
        if self._table is not None and any(MASK_TEXT in text for text in texts):
            texts = [text.replace(MASK_TEXT, _MASKED) for text in texts]
        joined = "".join(texts)
        if self._table is not None and joined.isascii():
            # Table lookup takes a hundredth of the time.
            ids_T = self._table[np.frombuffer(joined.encode("ascii"), dtype=np.uint8)]
            if (ids_T >= 0).all():
                return ids_T, sequence_lengths(texts)
        # Report unknown letters first: BPE would silently drop them, other models raise a bare exception.
        if self._table is not None and self.unknown is None:
            self.unknown_letters.report(texts)
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encodings = self._backend.encode_batch_fast([*map(self._prepared, texts)], add_special_tokens=False)
        return end_to_end([encoding.ids for encoding in encodings])

    def _attempt(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of :meth:`encode`, or no ids if a letter is unknown and there is no unknown token."""
        try:
            return self._encode(texts)
        except Exception:  # noqa: BLE001 - the tokenizers library raises nothing else
            return end_to_end([])

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self._tokenizer.save_pretrained(folder)
        path = folder / TOKENIZER_CONFIG_FILE
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**settings, _SPACED_KEY: self.spaced}, indent=2) + "\n", encoding="utf-8")

    def knows(self, letters: str) -> bool:
        """Return whether every one of these residues has a token other than the unknown token."""
        ids = self._attempt([letters])[0].tolist()
        return bool(ids) and self.unknown not in ids

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts of the tokens by id; a residue is its letter, without a word mark."""
        texts = {index: token for token, index in self._tokenizer.get_vocab().items()}
        if self._table is not None:
            texts |= {int(self._table[ord(letter)]): letter for letter in AMINO_ACIDS}
        return tuple(texts.get(index, "") for index in range(self.vocabulary_size))

    def _prepared(self, text: str) -> str:
        return " ".join(text.upper().translate(self._rare_to_x)) if self.spaced else text

    def _residue_table(self) -> NDArray[np.int32] | None:
        """Return (256,) the id of each letter, -1 for other bytes. None if ids depend on more than the letter, or if an
        amino acid is unknown.

        Verified on every pair of known letters and on a long protein, which covers all context that an id could depend
        on.
        """
        ids, lengths = self._attempt([*self.known])
        # The cheap test first, which rejects most text tokenizers.
        if not {*AMINO_ACIDS} <= {*self.known} or lengths.size == 0 or (lengths != 1).any():
            return None
        table = np.full(256, -1, dtype=np.int32)
        if self.unknown is not None:
            table[[*map(ord, _LETTERS)]] = self.unknown
        table[[*map(ord, self.known)]] = ids
        if self.mask is not None:
            table[ord(_MASKED)] = self.mask
        tried = ["".join(pair) for pair in itertools.product(self.known, repeat=2)]
        tried.append("".join(tried))
        ids, lengths = self._attempt(tried)
        expected = table[np.frombuffer("".join(tried).encode("ascii"), dtype=np.uint8)]
        same = np.array_equal(ids, expected) and np.array_equal(lengths, sequence_lengths(tried))
        return table if same else None


def open_folder(folder: Path, is_text: bool) -> HuggingFaceTokenizer:
    """Open the fast tokenizer of a local folder; see :func:`esmeray.dataset.tokens.base.open_tokenizer`."""
    how: dict[str, Any] = {}
    # AntiBERTy's checkpoint and checkpoints of transformers' Trainer have their vocabulary one folder above.
    if not _has_vocabulary(folder) and _has_vocabulary(folder.parent) and (folder / CONFIG_FILE).is_file():
        how = {"tokenizer_type": read_settings(folder / CONFIG_FILE, SOURCE_KEY).get("model_type")}
        warn(f"{folder} has no tokenizer; the one in {folder.parent} is used")
        folder = folder.parent
    saved = folder / TOKENIZER_CONFIG_FILE
    spaced = read_settings(saved, SOURCE_KEY).get(_SPACED_KEY) if saved.is_file() else None
    # Letters of a text are not residues, even if the vocabulary consists of single letters.
    if is_text:
        spaced = False
    automatic = _auto_tokenizer(folder, **how)
    if not _has_single_letters(automatic):
        return HuggingFaceTokenizer(automatic, bool(spaced))
    # Settings saved with the tokenizer are final.
    choices = (False, True) if spaced is None else (spaced,)
    tokenizers = []
    for reading, between in itertools.product(_readings(folder, automatic, how), choices):
        tokenizers.append(HuggingFaceTokenizer(reading, between))
        if tokenizers[-1].one_token_per_residue:
            break
    # If none has one token per residue, return the one that knows most letters, for a precise error message.
    return max(tokenizers, key=lambda tokenizer: (tokenizer.one_token_per_residue, len(tokenizer.known)))


def _readings(folder: Path, automatic: Any, how: dict[str, Any]) -> Iterator[Any]:
    """Yield ways to read a vocabulary of single letters: as transformers does, with both letter cases, as in the file.

    ``how``: settings of every way.

    transformers lower-cases text for a BERT unless its folder says otherwise. For T5 it uses its own pre-tokenizer,
    which marks the start of a word, and ignores the one in the tokenizer.json of a protein T5 (Ankh).
    """
    special = _special_tokens(automatic) | how
    for letter_case in ({}, {"do_lower_case": False}, {"do_lower_case": True}):
        yield _auto_tokenizer(folder, **(special | letter_case))
    if (folder / TOKENIZER_FILE).is_file():
        yield _auto_tokenizer(folder, "PreTrainedTokenizerFast")


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return special tokens as the vocabulary spells them, e.g. ``<unk>``, if the tokenizer would add another spelling.

    An added token would have an id beyond the embedding. A missing unknown, padding or mask token becomes None.
    """
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    names = {token.strip("<>[]").lower(): token for token in own if not _letters(token)}
    tokens: dict[str, Any] = {}
    for role, known in _ROLES.items():
        spellings = [names[name] for name in known.split("|") if name in names]
        is_added = str(getattr(tokenizer, f"{role}_token")) not in {*own, "None"}
        # Tokens around a sequence can't be left out.
        if is_added and (spellings or role not in ("cls", "sep")):
            tokens[f"{role}_token"] = spellings[-1] if spellings else None
    return tokens


def _has_vocabulary(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _VOCABULARY_FILES)


def _auto_tokenizer(folder: Path, reader: str = "AutoTokenizer", **settings: Any) -> Any:
    import transformers

    if not _has_vocabulary(folder):
        raise ConfigError(
            f"{SOURCE_KEY}: {folder} has no tokenizer (no {TOKENIZER_FILE}, vocab.txt, vocab.json or *.model)"
        )
    # A flipped bit may leave a readable tokenizer with other ids.
    for path in sorted(path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern)):
        verified(path)
    # Silenced, because warnings would be confusing if the tokenizer is refused or read in another way.
    with quiet_transformers():
        try:
            kind = getattr(transformers, reader)
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
        except Exception as error:  # the tokenizers library raises nothing else
            raise ConfigError(f"{SOURCE_KEY}: the tokenizer in {folder} can't be read ({first_line(error)})") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{SOURCE_KEY}: {folder} has no fast tokenizer; give a folder with a {TOKENIZER_FILE}")
    return tokenizer


def end_to_end(ids: Sequence[Sequence[int] | NDArray[np.integer]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids of N texts, concatenated, (T,), and the number per text, (N,)."""
    lengths_N = sequence_lengths(ids)
    return np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths_N.sum())), lengths_N


def _around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer puts before and after a text. Raises ConfigError for ids at other positions."""
    try:
        encoding = backend.encode("A", add_special_tokens=True)
    except Exception:  # noqa: BLE001 - neither A nor an unknown token: a reading that knows no residues is not taken
        return (), ()
    own = backend.encode("A", add_special_tokens=False).ids
    # A vocabulary may have no token for the text, not even an unknown token.
    first = encoding.special_tokens_mask.index(0) if own else 0
    prefix, suffix = encoding.ids[:first], encoding.ids[first + len(own) :]
    if [*prefix, *own, *suffix] != encoding.ids:
        raise ConfigError(
            "the tokenizer inserts special tokens inside the text; only tokens before and after it are supported"
        )
    return tuple(prefix), tuple(suffix)


def _has_single_letters(tokenizer: Any) -> bool:
    """Return whether all tokens except special ones have at most one character."""
    special = {*tokenizer.all_special_tokens, *tokenizer.added_tokens_encoder}
    return all(len(_letters(token)) <= 1 for token in tokenizer.get_vocab() if token not in special)


def _letters(token: str) -> str:
    """Return the token without its word mark; empty for what looks like <a special token> or [ANOTHER]."""
    if len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]")):
        return ""
    for mark in _WORD_MARKS:
        token = token.removeprefix(mark)
    return token
