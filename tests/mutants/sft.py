"""Bugs to plant in supervised training, the quickstart and the reward curve: (name, file, old text, new text, test)."""

SUPERVISED, SFT, KEYS = "verlite/data/supervised.py", "verlite/trainer/sft.py", "verlite/config/sft.py"
MAKE, CURVE = "recipes/quickstart/make.py", "verlite/trainer/curve.py"
LOSS = "tests/trainer/test_sft.py::test_the_loss_is_transformers_label_loss_with_prompts_left_out"
RANKS = "tests/trainer/test_sft.py::test_two_ranks_learn_what_one_does"
EXAMPLES, PLOT = "tests/data/test_supervised.py", "tests/trainer/test_curve.py"

MUTANTS = [
    ("the loss is on prompts too", SUPERVISED, "return prompt_ids, response_ids\n",
     "return prompt_ids[:1], prompt_ids[1:] + response_ids\n", LOSS),
    ("no end token is learned", SUPERVISED, "[*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]",
     "tokenizer.encode(response, add_special_tokens=False)", LOSS),
    ("each micro-batch is averaged by itself", SFT, "/ counts.tokens,", "/ mask.sum(),", LOSS),
    ("the last response token is left out", SFT, "response_mask = pad([[1] * len(ids) for ids in responses], r, torch.int64)",
     "response_mask = pad([[1] * (len(ids) - 1) for ids in responses], r, torch.int64)", LOSS),
    ("every rank takes the whole batch", SFT, "sampler.next_batch()[rank::ranks]", "sampler.next_batch()", RANKS),
    ("validation is this rank's alone", SFT, "    dist.all_reduce(sums)\n", "", RANKS),
    ("every rank prints", SFT, "out.quiet = rank > 0", "pass", RANKS),
    ("an overlong example passes", SUPERVISED, "if length > data.max_length:", "if length > data.max_length + 1:", EXAMPLES),
    ("the start is cut off", SUPERVISED, "response_ids[: max(0, data.max_length - len(prompt_ids))]",
     "response_ids[-max(0, data.max_length - len(prompt_ids)) :]", EXAMPLES),
    ("an unknown key is passed over", KEYS, "if owner is None or owner.section:", "if owner is None:\n                continue\n            if owner.section:",
     "tests/trainer/test_sft.py::test_every_wrong_key_is_told_at_once"),
    ("held-out sums are trained on", MAKE, "return every[TEST_PROBLEMS:], every", "return every, every", "tests/recipes/test_quickstart.py"),
    ("the hundreds are lost", MAKE, 'written += f"{column % 10}{carry}"', 'written += f"{column % 10}{carry if place == 1 else 0}"',
     "tests/recipes/test_quickstart.py"),
    ("a step without a score is drawn", CURVE, "if line.get(key) is not None", "if key in line", PLOT),
    ("best of n passes for the mean", CURVE, 'and "/mean@" in key', "", PLOT),
    ("an eighth too high", CURVE, "level - 8 * row))]", "level - 8 * row + 1))]", PLOT),
]  # fmt: skip
