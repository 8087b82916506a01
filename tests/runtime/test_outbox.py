"""Orders arrive in the order in which they were given."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from raycheck.runtime.outbox import Outbox


@given(st.lists(st.sampled_from(["put", "done", "fail"])))
def test_one_batch_at_a_time_and_all_that_waited_in_the_next(doings):
    """Whenever a batch ends, and however: the next holds what was given since, in that order."""
    sent: list[tuple[tuple[int, ...], Future]] = []

    def send(batch):
        future = Future()
        sent.append((batch, future))
        return future

    outbox, num_put = Outbox(send), 0
    for doing in [*doings, *["done"] * (len(doings) + 1)]:
        if doing == "put":
            outbox.put(num_put)
            num_put += 1
        elif sent and not sent[-1][1].done():
            if doing == "done":
                sent[-1][1].set_result(None)
            else:
                sent[-1][1].set_exception(OSError("the agent is gone"))
        assert all(future.done() for _, future in sent[:-1])
    assert [order for batch, _ in sent for order in batch] == list(range(num_put))


def test_many_threads_lose_nothing_and_never_overlap():
    """Batches are carried out by a pool; none begins before the one before has ended."""
    carried_out: list[int] = []
    busy = threading.Lock()

    def carry_out(batch):
        assert busy.acquire(blocking=False), "two batches at once"
        carried_out.extend(batch)
        busy.release()

    with ThreadPoolExecutor(8) as pool:
        outbox = Outbox(lambda batch: pool.submit(carry_out, batch))
        givers = [
            threading.Thread(target=lambda first=first: [outbox.put(first + i) for i in range(200)])
            for first in range(0, 800, 200)
        ]
        for giver in givers:
            giver.start()
        for giver in givers:
            giver.join()
        last = threading.Event()
        outbox._send = lambda batch: (last.set(), pool.submit(carry_out, batch))[1]
        outbox.put(800)
        assert last.wait(60)
    assert sorted(carried_out) == list(range(801))
    for first in range(0, 800, 200):
        own = [order for order in carried_out if first <= order < first + 200]
        assert own == sorted(own)
