import pytest

from verlite.config.rules.declared import duration_s


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("14400", 14400),
        ("90m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("00:30:00", 1800),
        ("2-12:00:01", 216001),
    ],
)
def test_durations(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "4 h", "1:60:00", "12:30", "1w", "inf"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        duration_s(text)
