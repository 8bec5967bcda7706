# Background tasks end at a shutdown, even one that swallows a cancellation.

import asyncio

import pytest

from servanda.gateway.http.tasks import end


@pytest.mark.parametrize("turns", range(6))
def test_a_loop_around_wait_for_ends_in_whichever_turn_its_event_comes(turns):
    async def run():
        event = asyncio.Event()

        async def forever():
            while True:
                await asyncio.wait_for(event.wait(), 3600.0)
                event.clear()

        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await end({task})
        return task.cancelled()

    assert asyncio.run(run())
