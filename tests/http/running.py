"""An application of verlite.http.server in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from verlite.http.server import HTTPServer, bind, url


@contextmanager
def running(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serve on loopback and yield the address. Port 0: a free one."""
    bound = bind("127.0.0.1", port)
    server = HTTPServer(app, "ready")
    thread = threading.Thread(target=server.run, args=[[bound]])
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield url(bound)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
