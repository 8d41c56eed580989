"""Notice a lost node of a joined cluster before Ray does.

Ray's head needs up to a minute to declare a silent node dead, and a driver that cannot reach the
head ends after a minute with a message of Ray's own. So a thread of the driver opens a TCP
connection to Ray on each node every few seconds.
"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

PROBE_EVERY_S = 3.0
PROBE_TIMEOUT_S = 5.0
MAX_FAILURES = 4
"""A node is lost after this many failed probes in a row: after 12 s if the connection is refused,
after 32 s if nothing answers. Probes are counted, not seconds: a suspended driver sends none."""
MAX_THREADS = 32


@dataclass(frozen=True)
class Watched:
    """Something that must stay reachable.

    Attributes:
        name: for messages, such as "node 10.0.0.2 (rank 1)".
        address: (host, port) of Ray there.
        node_id: Ray's id of the node; None for the head's own service.
    """

    name: str
    address: tuple[str, int]
    node_id: str | None


class NodeWatch:
    """A thread that probes nodes until `stop`.

    Attributes:
        lost: {what: reason} for the nodes that no longer answer. A lost node stays lost.
    """

    def __init__(self, watched: list[Watched]) -> None:
        self.lost: dict[Watched, str] = {}
        self._failures = dict.fromkeys(watched, 0)
        self._stopped = threading.Event()
        if watched:
            threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(min(len(self._failures), MAX_THREADS)) as pool:
            while not self._stopped.wait(PROBE_EVERY_S):
                watched = list(self._failures)
                for one, error in zip(watched, pool.map(probe, watched), strict=True):
                    self._failures[one] = self._failures[one] + 1 if error else 0
                    if self._failures[one] >= MAX_FAILURES:
                        self.lost.setdefault(one, error)


def probe(watched: Watched) -> str:
    """Return why Ray cannot be reached there, "" if it can."""
    try:
        socket.create_connection(watched.address, timeout=PROBE_TIMEOUT_S).close()
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, OverflowError) as error:  # a host name or port that is none
        return str(error)
