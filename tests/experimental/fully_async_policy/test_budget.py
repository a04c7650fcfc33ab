from verl.experimental.fully_async_policy.budget import StalenessBudget
from verl.workers.config.async_training import AsyncTrainingConfig


def started(budget):
    count = 0
    while not budget.is_spent:
        budget.start()
        count += 1
    return count


def test_what_is_left_from_before_a_sync_takes_the_place_of_what_may_be_started_after_it():
    budget = StalenessBudget(limit=6)
    assert started(budget) == 6
    budget.synced(outstanding=2)
    assert started(budget) == 4
    budget.synced(outstanding=6)
    assert started(budget) == 0


def test_the_limit_is_what_is_trained_until_the_next_sync_and_a_share_of_it_more():
    def limit(staleness, trigger):
        config = AsyncTrainingConfig(staleness_threshold=staleness, trigger_parameter_sync_step=trigger)
        return config.max_outstanding(required=8)

    assert limit(0, 1) == 8
    assert limit(0, 4) == 32
    assert limit(0.5, 1) == 12
    assert limit(0.1, 4) == 35
