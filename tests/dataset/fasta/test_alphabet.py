"""What is done to letters is counted, and done nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.dataset.fasta.alphabet import STORE_BYTES, bad_to_x, clean


@given(st.binary(max_size=50))
def test_any_bytes_become_storable_by_x(residues):
    cleaned = clean(residues)
    stored = bad_to_x(cleaned.residues)
    assert not stored.translate(None, STORE_BYTES)
    assert len(stored) == len(residues) - cleaned.stop_dropped
    assert stored.count(b"X") >= cleaned.num_bad + cleaned.j_to_x


@pytest.mark.parametrize(
    ("raw", "residues", "stop_dropped", "num_bad"),
    [(b"MK*", b"MK", True, 0), (b"M*K", b"M*K", False, 1), (b"MK**", b"MK*", True, 1), (b"*", b"", True, 0)],
)
def test_only_one_final_stop_is_dropped(raw, residues, stop_dropped, num_bad):
    assert clean(raw) == (residues, False, stop_dropped, 0, num_bad)
