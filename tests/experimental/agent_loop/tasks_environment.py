"""A taskset of verifiers 0.4, loaded by an interpreter of its own."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.answer == "4":
            raise RuntimeError("the judge is gone")
        return float("nan") if self.data.answer == "5" else float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(SumData(prompt=f"{n}+1=?", answer=str(n + 1)), self.config.task) for n in range(6)]


__all__ = ["Sums"]
