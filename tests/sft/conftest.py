"""What tests of main_sft and main_dpo share."""

import os
import signal

import pytest

from verlite.sft import train


@pytest.fixture
def stopping(monkeypatch):
    """Send SIGTERM to this process at the beginning of step 5."""
    update = train.update

    def stop_in_step_5(run, rows):
        if run.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        update(run, rows)

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", stop_in_step_5)
        yield patch
