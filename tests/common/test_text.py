from esmeray.common.text import amount, duration


def test_durations_and_amounts_are_short():
    seconds = {0: "0 s", 59.4: "59 s", 60: "1:00", 3725: "1:02:05", 200_000: "2 d 7 h"}
    assert {value: duration(value) for value in seconds} == seconds
    values = {0: "0", 999: "999", 12_345: "12.3k", 999_960: "1.00M"}
    assert {value: amount(value) for value in values} == values
