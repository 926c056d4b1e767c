"""An asyncio front: requests come and go while the loop runs, and join the running batch at its next segment.

    async with kvjax.AsyncLLM(kvjax.load()) as llm:
        async for piece in llm.stream("Once upon a time", max_new_tokens=100):
            print(piece, end="", flush=True)

One thread drives the device; the event loop never waits for it. Requests share prefixes with all others of the same
`cache_salt`, running or gone, as long as their pages are not needed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from kvjax import plans
from kvjax.errors import RequestError
from kvjax.job import Job, Output, Report
from kvjax.llm import LLM, Completion, Pieces, Prompt, Sample, params_of
from kvjax.plans import Plan, Request
from kvjax.sampling_params import SamplingParams

_Listener = Callable[[Output], None]


@dataclasses.dataclass(frozen=True)
class _Ask:
    """A request for the driving thread.

    Attributes:
      request: the request.
      listen: called in the event loop with the output at every segment, and with the finished one.
    """

    request: Request
    listen: _Listener


class AsyncLLM:
    """Serves prompts that come at any time from one running batch."""

    def __init__(self, llm: LLM, *, max_length: int | None = None, segment_seconds: float = 0.1, seed: int = 0):
        """Nothing is allocated or compiled before the first request.

        Args:
          llm: the model; its options say how many requests run at once, and how much memory K and V may take.
          max_length: most tokens of a prompt with its output; the model's context when None. Less needs less memory
            per slot.
          segment_seconds: new requests, cancellations and tokens pass between device and host about this often.
          seed: of sampling, for requests without a seed of their own. The i-th prompt draws from (seed, i).
        """
        if max_length is not None and not 2 <= max_length <= llm.context:
            raise RequestError(f"max_length is {max_length}: give 2 to {llm.context}, the context of the model.")
        options = dataclasses.replace(llm.options, segment_seconds=segment_seconds, refill=llm.options.refill or 1)
        self.llm, self.max_length = llm, max_length or llm.context
        self._job = Job(llm.model, options, seed=seed, plan=_plan(llm, self.max_length))
        self._inbox: queue.SimpleQueue[_Ask | Request | None] = queue.SimpleQueue()
        self._prompts = 0
        self._listeners: dict[int, _Listener] = {}
        self._orders: dict[tuple[int, int], int] = {}
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._report: Report | None = None

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ):
        await self.close()

    async def close(self) -> None:
        """Ends the thread at the end of the segment; requests that run are cancelled."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)

    @property
    def report(self) -> Report | None:
        """The last segment's counters: tokens computed and found, preemptions, requests that wait."""
        return self._report

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = "", **sampling: Any
    ) -> Completion:
        """The completion of one prompt. Cancelling the task frees its slots and pages at the next segment.

        Raises:
          RequestError: a prompt or parameter that can never be served.
        """
        requests = self._requests(prompt, params, cache_salt, sampling)
        done: list[Output] = [output async for output in self._follow(requests) if output.finish_reason]
        samples: dict[int, Sample] = {output.request.sample: self.llm.sample_of(output) for output in done}
        return Completion(requests[0].prompt, tuple(samples[i] for i in range(len(requests))))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = "", **sampling: Any
    ) -> AsyncGenerator[str, None]:
        """Yields the text of one prompt as it appears; leaving the loop early (`aclose`) cancels the request.

        Raises:
          RequestError: a prompt or parameter that can never be served, or n over 1; at once, not at the first piece.
        """
        requests = self._requests(prompt, params, cache_salt, sampling)
        if len(requests) != 1:
            raise RequestError(f"n is {len(requests)}, and a stream has one sample: use generate for several.")
        return self._stream(requests)

    async def _stream(self, requests: list[Request]) -> AsyncGenerator[str, None]:
        pieces = Pieces(self.llm, requests[0].params)
        outputs = self._follow(requests)
        try:
            async for output in outputs:
                if piece := pieces.take(output):
                    yield piece
        finally:
            await outputs.aclose()

    def _requests(self, prompt: Prompt, params: Any, salt: str, sampling: dict[str, Any]) -> list[Request]:
        (p,) = params_of(params, sampling, 1)
        requests = self.llm.requests(prompt, p, self._prompts, salt=salt)
        plans.check(requests[0], self.max_length)
        self._prompts += 1
        return requests

    async def _follow(self, requests: list[Request]) -> AsyncGenerator[Output, None]:
        """The outputs of requests at every segment, until all have finished."""
        self._start()
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        left = {request.sample: request for request in requests}
        for request in requests:
            self._inbox.put(_Ask(request, outputs.put_nowait))
        try:
            while left:
                output = await outputs.get()
                if output is None:
                    raise self._ended() from self._error
                if output.finish_reason:
                    del left[output.request.sample]
                yield output
        finally:
            for request in left.values():
                self._inbox.put(request)

    # --- the driving thread ----------------------------------------------------------------------------------
    def _start(self) -> None:
        if self._error is not None:
            raise self._ended() from self._error
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._drive, name="kvjax", daemon=True)
            self._thread.start()
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM serves another event loop: make one for each")

    def _ended(self) -> RuntimeError:
        return RuntimeError("AsyncLLM was closed" if self._error is None else "the engine of AsyncLLM has failed")

    def _drive(self) -> None:
        try:
            while self._take_messages():
                self._report = self._job.advance(follow=True)
                for output in (*self._report.running, *self._report.finished):
                    self._deliver(output)
        except BaseException as error:
            self._error = error
        finally:
            for listen in self._listeners.values():
                self._call(listen, None)
            self._listeners.clear()

    def _take_messages(self) -> bool:
        """Waits while there is nothing to do; whether to go on."""
        while True:
            try:
                message = self._inbox.get(block=not self._job.unfinished)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, _Ask):
                order = self._job.add(message.request)
                self._listeners[order] = message.listen
                self._orders[message.request.index, message.request.sample] = order
            else:
                order = self._orders.get((message.index, message.sample), -1)
                self._listeners.pop(order, None)
                self._job.cancel([order])

    def _deliver(self, output: Output) -> None:
        key = output.request.index, output.request.sample
        order = self._orders[key]
        listen = self._listeners.get(order)
        if output.finish_reason:
            del self._orders[key]
            self._listeners.pop(order, None)
        if listen is not None:
            self._call(listen, output)

    def _call(self, listen: Callable[[Any], None], output: Output | None) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(listen, output)


def _plan(llm: LLM, max_length: int) -> Plan:
    """Shapes for greedy and sampled requests of any length; others make them grow when the first one comes."""
    options, model = llm.options, llm.model
    sample = Request(0, 0, (0,) * (max_length - 1), SamplingParams(max_new_tokens=1))
    return plans.plan(model, [sample] * options.slots, options)
