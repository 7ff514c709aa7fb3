"""Random bits are a pure function of seed, epoch, record and position."""

import numpy as np

from esmeray.dataset.batches.random_bits import keyed_bits, positional_bits, splitmix64


def test_outputs_are_those_of_the_reference_splitmix64():
    # First outputs of the reference C code (Vigna, prng.di.unimi.it/splitmix64.c) from state 1234567.
    gamma, state = 0x9E3779B97F4A7C15, 1234567
    states = np.array([(state + index * gamma) % 2**64 for index in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_each_of_purpose_seed_epoch_and_record_changes_the_bits():
    variants = [(1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, 1, 1, 0), (0, 1, 0, 0)]
    bits = {int(keyed_bits(purpose, seed, epoch, np.array([record]))[0]) for purpose, seed, epoch, record in variants}
    assert len(bits) == len(variants)


def test_positions_of_all_sequences_have_bits_of_their_own_and_half_of_them_set():
    bits = positional_bits(keyed_bits(1, 0, 0, np.arange(100)), np.arange(0, 100_001, 1000))
    assert np.unique(bits).size == bits.size
    ones_of_each_bit = [(bits >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(ones_of_each_bit) - 0.5).max() < 0.01
