"""How good a response is."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a response that is the answer and nothing else, 0.1 for one that begins with it, else 0.

    data_source, ground_truth and extra_info are those of the prompt's row (make_data.py). Other entries than `score`
    become metrics.
    """
    response = solution_str.strip()
    begins = response.startswith(ground_truth)
    return {"score": 1.0 if response == ground_truth else 0.1 if begins else 0.0, "begins_right": begins}
