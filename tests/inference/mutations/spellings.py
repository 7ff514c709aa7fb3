"""Notations of mutants in tables and databases."""

from hypothesis import strategies as st

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.variants import Mutant, Protein

NAMES = "Ala Cys Asp Glu Phe Gly His Ile Lys Leu Met Asn Pro Gln Arg Ser Thr Val Trp Tyr"
NAME_OF = dict(zip(AMINO_ACIDS, NAMES.split(), strict=True))
SEPARATORS = (":", ",", ";", "/", "+", "_", " ", ", ", "-", "|")


@st.composite
def spelled(draw: st.DrawFn, protein: Protein, mutant: Mutant) -> str:
    """Draw a notation of a mutant that has substitutions only."""
    taken = {mutation.offset for mutation in mutant.mutations}
    changes = [(m.wild, m.offset + protein.first, m.mutant) for m in mutant.mutations]
    free = [offset for offset in range(len(protein.sequence)) if offset not in taken]
    # Synonymous changes are not part of the mutant's substitutions.
    for offset in draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []:
        changes.append((protein.sequence[offset], offset + protein.first, protein.sequence[offset]))
    if not changes:
        return draw(st.sampled_from(["WT", "wt", "_wt", "_sy", "p.=", "p.(=)", "wildtype"]))
    changes = draw(st.permutations(changes))
    if draw(st.booleans()):
        texts = [
            f"{NAME_OF[wild]}{position}{'=' if wild == new and draw(st.booleans()) else NAME_OF[new]}"
            for wild, position, new in changes
        ]
        text = f"p.{texts[0]}" if len(texts) == 1 else f"p.[{';'.join(texts)}]"
        text = draw(st.sampled_from(["", "NP_000509.1:", "Q9Y6K9:"])) + text
    else:
        unnamed = draw(st.booleans())
        texts = [f"{'' if unnamed else wild}{position}{new}" for wild, position, new in changes]
        text = draw(st.sampled_from(SEPARATORS[:-2] if unnamed else SEPARATORS)).join(texts)
    return draw(st.sampled_from([text, text.lower(), text.upper()]))
