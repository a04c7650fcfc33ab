import asyncio

import pytest

from verl.experimental.fully_async_policy.message_queue import MessageQueue, Sample
from verl.protocol import DataProto
from verl.utils.progress import Progress


def sample(index):
    return Sample(index, DataProto.from_dict(non_tensors={"index": [index]}), seconds=1.0)


async def test_samples_are_taken_together_and_the_oldest_first():
    queue = MessageQueue(capacity=4)
    taking = asyncio.create_task(queue.take(2))
    assert await queue.progress() is None  # nobody waits yet
    await queue.put(sample(7))
    await asyncio.sleep(0)
    assert not taking.done()
    assert await queue.progress() == Progress(1, 2, "prompts")
    await queue.put(sample(3))
    await queue.put(sample(5))
    assert [one.index for one in await taking] == [7, 3]
    assert [one.index for one in await queue.content()] == [5]


async def test_a_full_queue_makes_its_producer_wait_and_counts_that():
    queue = MessageQueue(capacity=1)
    await queue.put(sample(0))
    putting = asyncio.create_task(queue.put(sample(1)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(putting), 0.05)
    assert [one.index for one in await queue.take(1)] == [0]
    await putting
    assert await queue.metrics() == {
        "fully_async/count/queue_size": 1.0,
        "fully_async/count/full_queue_waits": 1.0,
        "fully_async/count/dropped_stale_samples": 0.0,
    }


async def test_a_restored_queue_begins_with_what_it_is_given():
    queue = MessageQueue(capacity=4)
    taking = asyncio.create_task(queue.take(1))
    await asyncio.sleep(0)
    await queue.restore([sample(4), sample(5)])
    assert [one.index for one in await taking] == [4]
