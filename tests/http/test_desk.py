"""The request queue of the services: requests that end before their turn."""

import asyncio

from verlite.http.desk import Desk


def test_a_request_cancelled_while_its_client_is_looked_for_ends_alone():
    async def run():
        desk = Desk(lambda jobs: [job + 1 for job in jobs], lambda job: 1, 8)
        looking, found = asyncio.Event(), asyncio.Event()

        async def gone():
            looking.set()
            await found.wait()
            return True

        async def there():
            return False

        async with desk.open():
            first = asyncio.create_task(desk.answer(1, gone))
            await looking.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            found.set()
            async with asyncio.timeout(10):
                return first.cancelled(), await desk.answer(2, there)

    assert asyncio.run(run()) == (True, 3)
