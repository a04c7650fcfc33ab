"""python -m unittest: what the reward says of good and bad responses. Add those that surprised you."""

import unittest

from reward import compute_score


def score(response, truth):
    return compute_score("my/additions", response, truth)["score"]


class Reward(unittest.TestCase):
    def test_the_answer_alone_earns_all(self):
        self.assertEqual(score("42", "42"), 1.0)
        self.assertEqual(score(" 42\n", "42"), 1.0)

    def test_more_text_behind_the_answer_earns_little(self):
        self.assertEqual(score("42?", "42"), 0.1)

    def test_another_answer_earns_nothing(self):
        for response in ("41", "", "the answer is 42"):
            self.assertEqual(score(response, "42"), 0.0)


if __name__ == "__main__":
    unittest.main()
