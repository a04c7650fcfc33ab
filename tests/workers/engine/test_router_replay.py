"""Experts that a batch names are used by every pass of Megatron, whatever its routers would choose."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import (
    NUM_PROMPT,
    NUM_RESPONSE,
    assemble,
    assert_same_weights,
    batch,
    held_parts,
    reference_log_probs,
    weighted_loss,
)
from tests.workers.engine.megatron_cases import (
    EP2,
    PP2,
    SEQUENCE,
    SMALL,
    TP2,
    WHOLE_EXPERTS,
    as_in_the_file,
    make_megatron,
    own_rows,
    tiny_moe,
)
from verl.workers.config.megatron import RouterReplayConfig
from verl.workers.engine.base import ROUTES
from verl.workers.losses import LossTotals

LAYERS, EXPERTS, TAKEN = 2, 4, 2
REPLAY = {"router_replay": RouterReplayConfig(mode="R2")}
LAYOUTS = [
    pytest.param(2, EP2, id="experts dealt out to two ranks"),
    pytest.param(4, PP2 | EP2 | {"recompute": True}, id="two stages, recomputed"),
    pytest.param(2, TP2 | SEQUENCE | EP2 | WHOLE_EXPERTS, id="tokens shared by two ranks"),
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("moe") / "model")


def some_routes(seed: int) -> torch.Tensor:
    """Any two experts for every token and layer of `batch(12)`; for some the router chooses."""
    generator = torch.Generator().manual_seed(seed)
    shape = (12, NUM_PROMPT + NUM_RESPONSE, LAYERS)
    routes = torch.rand(*shape, EXPERTS, generator=generator).argsort(-1)[..., :TAKEN].to(torch.int16)
    routes[torch.rand(shape, generator=generator) < 0.2] = -1
    return routes


class Forced(torch.nn.Module):
    """A router of transformers' that takes the experts of the sequence that is computed."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.router = router
        self.given: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None

    def forward(self, hidden_states):
        logits, _, chosen = self.router(hidden_states)
        if self.given is not None:
            chosen = torch.where(self.given < 0, chosen, self.given.long())
        self.chosen = chosen
        probabilities = logits.softmax(-1).gather(-1, chosen)
        return logits, probabilities / probabilities.sum(-1, keepdim=True), chosen


class Reference:
    """Transformers' model in one process, sequence by sequence."""

    def __init__(self, path, *, negated: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.routers = [Forced(layer.mlp.gate) for layer in self.model.model.layers]
        for layer, router in zip(self.model.model.layers, self.routers, strict=True):
            layer.mlp.gate = router
            if negated:
                router.router.weight.data.neg_()

    def log_probs(self, data, routes=None):
        """Log-probs [B, R], and what the routers chose [B, P+R, layers, k]."""
        rows, chosen = [], torch.full((len(data), NUM_PROMPT + NUM_RESPONSE, LAYERS, TAKEN), -1)
        for row in range(len(data)):
            kept = data.batch["attention_mask"][row].bool()
            for number, router in enumerate(self.routers):
                router.given = None if routes is None else routes[row, kept, number]
            rows.append(reference_log_probs(self.model, data[row : row + 1], 0.7)[0])
            for number, router in enumerate(self.routers):
                chosen[row, kept, number] = router.chosen
        return torch.cat(rows), chosen


def with_routes(data, routes):
    data.batch[ROUTES] = routes
    return data


def log_probs_of(engine, data):
    return engine.compute_log_prob(data, temperature=0.7, limits=SMALL)[0]


def replayed(path, options):
    """What the routers chose, log-probs along these experts once the routers would choose others, and a step."""
    options = options | REPLAY
    engine = make_megatron(path, options)
    log_probs_of(engine, own_rows(batch(12)))
    recorded = engine.take_routes()
    assert engine.take_routes() is None
    found = {"recorded": recorded}
    data = own_rows(with_routes(batch(12), some_routes(0)))
    totals = engine.train_mini_batch(data, weighted_loss, temperature=0.7, limits=SMALL)
    found |= {"metrics": totals, "trained": held_parts(engine)}

    other = make_megatron(path, options)
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if "router" in name:
                parameter.neg_()
    found["anew"] = log_probs_of(other, own_rows(batch(12)))
    other.take_routes()
    found["along"] = log_probs_of(other, with_routes(own_rows(batch(12)), recorded))
    assert other.take_routes() is None, "routes that were given are not told"
    return found


@pytest.mark.parametrize(("world_size", "options"), LAYOUTS)
def test_passes_take_the_experts_that_a_batch_names(ranks, moe, world_size, options):
    data = batch(12)
    with torch.no_grad():
        _, chosen = Reference(moe).log_probs(data)
        negated = Reference(moe, negated=True)
        anew, _ = negated.log_probs(data)
        along, _ = negated.log_probs(data, chosen)
    assert (anew - along).abs().max() > 1e-4, "the routers make no difference to this model"
    found = ranks.run(replayed, world_size, moe, options)

    recorded = torch.cat([rank["recorded"] for rank in found])
    assert torch.equal(recorded.long().sort(-1).values, chosen.sort(-1).values)
    torch.testing.assert_close(torch.cat([rank["anew"] for rank in found]), anew)
    torch.testing.assert_close(torch.cat([rank["along"] for rank in found]), along)

    reference = Reference(moe)
    optimizer = torch.optim.AdamW(reference.model.parameters(), lr=5e-3, betas=(0.9, 0.999), weight_decay=0.01)
    log_prob, _ = reference.log_probs(data, some_routes(0))
    loss, _ = weighted_loss(log_prob, None, data, LossTotals.of(data.batch["response_mask"]))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
    optimizer.step()
    for rank in found:
        assert rank["metrics"]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert rank["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    weights = {name.replace(".gate.router.", ".gate."): value for name, value in reference.model.named_parameters()}
    assert_same_weights(assemble([rank["trained"] for rank in found]), as_in_the_file(weights))


def frozen(path):
    """What a reference policy tells of its routers, and its log-probs without and with routes."""
    engine = make_megatron(path, REPLAY, trainable=False)
    data = own_rows(batch(12))
    anew = log_probs_of(engine, data)
    return engine.take_routes(), anew, log_probs_of(engine, with_routes(data, some_routes(1)))


def test_a_reference_policy_chooses_by_itself(ranks, moe):
    ((told, anew, along),) = ranks.run(frozen, 1, moe)
    assert told is None
    assert torch.equal(anew, along)
