"""Mutants of verlite.http: services without protection, clients without limits."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, constant, does_nothing

CLIENT = "verlite.http.client:"
SERVER = "verlite.http.server:"
CLIENT_TESTS = ("tests/http/test_client.py",)
SERVER_TESTS = ("tests/http/test_server.py",)


MUTANTS = [
    Mutant(
        "requests without the token are answered",
        SERVER + "_Guard.__init__",
        argument("token", lambda token: None),
        SERVER_TESTS,
    ),
    Mutant(
        "web pages of other sites can use services on loopback",
        "verlite.http.server:refusal",
        does_nothing,
        (*SERVER_TESTS, "tests/rollout/test_gate.py"),
    ),
    Mutant(
        "a small JSON text fills the memory",
        "verlite.files:parse_foreign_json",
        argument("values", lambda values: 10**9),
        ("tests/test_files.py", *CLIENT_TESTS),
    ),
    Mutant(
        "a client may send its headers forever",
        SERVER + "_Protocol._watch",
        does_nothing,
        SERVER_TESTS,
    ),
    Mutant(
        "a body of any size is read",
        SERVER + "read_body",
        argument("limit", lambda limit: 1 << 40),
        SERVER_TESTS,
    ),
    Mutant(
        "a failing server is never paused",
        CLIENT + "PAUSE_AFTER",
        constant(10**9),
        ("tests/envs/test_retriever.py::test_failing_server_is_paused_and_probed_by_one_request",),
    ),
]
