from verl.experimental.fully_async_policy.budget import StalenessBudget
from verl.workers.config.async_training import AsyncTrainingConfig


def started(budget, first=0):
    """How many may be, with places from `first` on."""
    count = 0
    while not budget.is_spent:
        budget.start(first + count)
        count += 1
    return count


def test_what_is_left_from_before_a_sync_takes_the_place_of_what_may_be_started_after_it():
    budget = StalenessBudget(limit=6)
    assert started(budget) == 6
    budget.synced({4, 5})
    assert started(budget, first=6) == 4
    budget.synced(range(4, 10))
    assert started(budget) == 0


def test_a_prompt_that_is_not_trained_on_makes_room_for_one_unless_it_was_taken_before_the_sync():
    budget = StalenessBudget(limit=4)
    assert started(budget) == 4
    budget.give_back([1, 2])
    assert started(budget, first=4) == 2
    budget.synced({4, 5})
    budget.give_back([0, 3])
    assert started(budget, first=6) == 2


def test_the_limit_is_what_is_trained_until_the_next_sync_and_a_share_of_it_more():
    def limit(staleness, trigger):
        config = AsyncTrainingConfig(staleness_threshold=staleness, trigger_parameter_sync_step=trigger)
        return config.max_outstanding(required=8)

    assert limit(0, 1) == 8
    assert limit(0, 4) == 32
    assert limit(0.5, 1) == 12
    assert limit(0.1, 4) == 35
