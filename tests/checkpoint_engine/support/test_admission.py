"""Listening sockets that let in one's own user on one's own hosts, and nobody else."""

import contextlib
import os
import socket
import threading
import time

import pytest

from benchmarks.namespaces import NotPermitted, joined_hosts
from tests.checkpoint_engine.fakes import soon
from tests.strangers import HEARS_NOTHING_S, PATIENCE_S, needs_root, talk
from tests.strangers import NOBODY as STRANGER
from verl.checkpoint_engine.support.admission import (
    ANY_HOST,
    LOOK_S,
    MOST_NETWORKS,
    NOBODY,
    OWN_USER,
    Admission,
    Doorkeeper,
    NotPrivileged,
    Unguarded,
    attach,
    can_filter,
    listening_here,
    program,
)


def refused(sock, filter_):
    """What newer kernels say to processes without CAP_NET_ADMIN."""
    raise NotPrivileged("[Errno 1] Operation not permitted")


@pytest.fixture(params=[attach, refused], ids=["filters", "without privilege"])
def doorkeeper(request):
    """Makes a Doorkeeper."""
    if request.param is attach and not can_filter():
        pytest.skip("this kernel wants CAP_NET_ADMIN for filters")
    return lambda *admission: Doorkeeper(*admission, attach=request.param)


@contextlib.contextmanager
def echo(keeper=None, host="127.0.0.1"):
    """What a library does that knows no passwords: it answers everybody. Yields its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    guarding = keeper.guarding() if keeper else contextlib.nullcontext()
    with guarding:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(64):
                connection.sendall(data)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        if keeper:
            keeper.close()


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
@pytest.mark.parametrize(
    ("admission", "own", "others"),
    [
        (None, "heard 64 bytes", "heard 64 bytes"),
        (OWN_USER, "heard 64 bytes", "shut out"),
        (ANY_HOST, "heard 64 bytes", "shut out"),
        (Admission(addresses=("10.9.8.7",)), "heard 64 bytes", "shut out"),
        (NOBODY, "nothing", "nothing"),
    ],
)
def test_of_this_host_the_same_user_is_let_in_and_others_hear_nothing(host, admission, own, others):
    patience_s = HEARS_NOTHING_S if own == "nothing" else PATIENCE_S
    with echo(Doorkeeper(admission) if admission else None, host) as port:
        assert talk([("127.0.0.1", port)] * 3, os.geteuid(), patience_s) == [own] * 3
        assert talk([("127.0.0.1", port)] * 2, STRANGER, patience_s) == [others] * 2


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
@pytest.mark.parametrize("admission", [OWN_USER, ANY_HOST, Admission(addresses=("10.9.8.7",)), NOBODY])
def test_without_privilege_the_same_user_is_let_in_and_others_are_soon_cut_off(host, admission):
    with echo(Doorkeeper(admission, attach=refused), host) as port:
        assert talk([("127.0.0.1", port)] * 3, STRANGER, words=0) == ["shut out"] * 3
        if admission == NOBODY:
            assert talk([("127.0.0.1", port)], os.geteuid(), words=0) == ["shut out"]
        else:
            assert talk([("127.0.0.1", port)], os.geteuid(), HEARS_NOTHING_S, words=0) == ["nothing"]
            assert talk([("127.0.0.1", port)], os.geteuid()) == ["heard 64 bytes"]


def test_a_conversation_goes_on_after_its_first_words_were_thrown_away(doorkeeper):
    with echo(doorkeeper()) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as talking:
        for words in (b"one", b"two", b"three"):
            talking.sendall(words)
            assert talking.recv(64) == words


@pytest.mark.skipif(not can_filter(), reason="this kernel wants CAP_NET_ADMIN for filters")
def test_one_of_this_host_that_has_left_before_it_was_known_is_shut_out_and_holds_nobody_up():
    keeper = Doorkeeper()
    with keeper.guarding():
        listener = socket.create_server(("127.0.0.1", 0))
    try:
        with socket.create_connection(listener.getsockname()) as talking:
            talking.sendall(b"hello")
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(60)
            assert accepted.recv(64) == b""  # a library that answers one after the other would wait here
    finally:
        keeper.close()
        listener.close()


def test_many_that_come_at_once_are_all_let_in(doorkeeper):
    with echo(doorkeeper()) as port, contextlib.ExitStack() as stack:
        talks = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(50)]
        for talking in talks:
            talking.sendall(b"hello")
        assert [talking.recv(64) for talking in talks] == [b"hello"] * 50


@pytest.mark.parametrize(("admitted", "reached"), [(False, False), (True, True)])
def test_other_hosts_are_let_in_by_their_addresses(admitted, reached, doorkeeper):
    try:
        with joined_hosts(2) as (one, two):
            answer = []

            def listen(ready, done):
                one.enter()
                keeper = doorkeeper(Admission(addresses=(two.address,) if admitted else ("10.9.8.7",)))
                with echo(keeper, "0.0.0.0") as port:
                    answer.append(port)
                    ready.set()
                    done.wait(300)

            def connect(ready):
                two.enter()
                ready.wait(300)
                patience_s = PATIENCE_S if admitted else HEARS_NOTHING_S
                answer.append(is_answered(one.address, answer[0], patience_s))

            ready, done = threading.Event(), threading.Event()
            server = threading.Thread(target=listen, args=(ready, done))
            client = threading.Thread(target=connect, args=(ready,))
            server.start(), client.start()
            client.join()
            done.set()
            server.join()
            assert answer[1] is reached
    except NotPermitted as exc:
        pytest.skip(str(exc))


def is_answered(host, port, patience_s):
    """Whether an echo answers for longer than it takes to see who is there."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as talking:
            talking.settimeout(PATIENCE_S)
            for _ in range(10):
                talking.sendall(b"hello")
                if not talking.recv(64):
                    return False
                time.sleep(5 * LOOK_S)
    except OSError:
        return False
    return True


def test_without_privilege_hosts_may_connect_before_they_are_known_and_are_cut_off_if_they_are_not():
    try:
        with joined_hosts(2) as (one, two):
            keeper, port = Doorkeeper(attach=refused), []
            listening, ended = threading.Event(), threading.Event()

            def listen():
                one.enter()
                with echo(keeper, "0.0.0.0") as at:
                    port.append(at)
                    listening.set()
                    ended.wait(300)

            said = []

            def connect():
                two.enter()
                listening.wait(300)
                with socket.create_connection((one.address, port[0]), timeout=PATIENCE_S) as talking:
                    for admitted in (None, two.address, "10.9.8.7"):
                        if admitted:
                            keeper.admit(Admission(addresses=(admitted,)))
                        time.sleep(5 * LOOK_S)
                        talking.sendall(b"hello")
                        said.append(talking.recv(64))
                    with socket.create_connection((one.address, port[0]), timeout=PATIENCE_S) as other:
                        said.append(other.recv(64))

            threads = [threading.Thread(target=each) for each in (listen, connect)]
            [thread.start() for thread in threads]
            threads[1].join()
            ended.set()
            threads[0].join()
    except NotPermitted as exc:
        pytest.skip(str(exc))
    assert said == [b"hello", b"hello", b"hello", b""]


@needs_root
def test_a_stranger_who_connected_before_there_was_a_guard_is_found():
    keeper = Doorkeeper()
    with pytest.raises(Unguarded, match="connected before the socket was guarded"), contextlib.ExitStack() as stack:
        stack.callback(keeper.close)
        with keeper.guarding():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            arguments = ([listener.getsockname()], STRANGER, HEARS_NOTHING_S)
            stranger = threading.Thread(target=talk, args=arguments)
            stranger.start()
            stack.callback(stranger.join)
            stack.enter_context(listener.accept()[0])


def test_whoever_is_admitted_later_gets_in_then(doorkeeper):
    keeper = doorkeeper(NOBODY)
    with echo(keeper) as port:
        assert not is_answered("127.0.0.1", port, HEARS_NOTHING_S)
        keeper.admit(OWN_USER)
        assert talk([("127.0.0.1", port)], os.geteuid()) == ["heard 64 bytes"]


def test_a_guard_leaves_no_socket_open_and_no_thread(doorkeeper):
    threads, sockets = set(threading.enumerate()), listening_here()
    with echo(doorkeeper()) as port:
        assert talk([("127.0.0.1", port)], os.geteuid()) == ["heard 64 bytes"]
    assert soon(lambda: set(threading.enumerate()) <= threads)
    assert listening_here().keys() <= sockets.keys()


def test_a_thousand_hosts_fit_into_a_filter_and_so_do_their_neighbours():
    addresses = tuple(f"10.{high}.{low}.7" for high in range(4) for low in range(250))
    assert len(program(Admission(addresses=addresses))) < 4 * MOST_NETWORKS
