"""Work that another thread does, or the asking one if nobody has begun it."""

import threading

import pytest

from raycheck.state.errand import Errand


def test_another_thread_does_it_beside_the_asking_one():
    """And is waited for, however long it takes."""
    goes_on = threading.Event()
    errand = Errand(lambda: (goes_on.wait(60), threading.get_ident())[1])
    thread = threading.Thread(target=errand.run)
    thread.start()
    errand.wait_for_begin()
    goes_on.set()
    assert errand.result() == thread.ident
    thread.join()


def test_what_nobody_has_begun_is_done_here():
    """A thread that comes to it later does nothing."""
    done_by = []
    errand = Errand(lambda: done_by.append(threading.get_ident()))
    errand.wait_for_begin()
    errand.result()
    thread = threading.Thread(target=errand.run)
    thread.start()
    thread.join()
    assert done_by == [threading.get_ident()]


def test_its_error_is_raised_where_the_result_is_asked_for():
    """In the other thread it ends nothing."""
    errand = Errand(lambda: 1 // 0)
    thread = threading.Thread(target=errand.run)
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError):
        errand.result()
