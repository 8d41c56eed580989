"""Bugs in what the benchmarks work out by themselves: (name, file, old text, new text, test)."""

TESTS = "tests/recipes/test_benchmark.py::"
GENERATION, GPU, PICTURE, STARTUP = (f"recipes/benchmark/{name}.py" for name in ("generation", "gpu", "picture", "startup"))

MUTANTS = [
    ("speeds are divided the wrong way round", GENERATION, "median(a / b for", "median(b / a for", TESTS + "test_ratios_are_of_our_speed_to_theirs"),
    ("the first round counts", GENERATION, "zip(theirs[1:], ours[1:], strict=True)", "zip(theirs, ours, strict=True)",
     TESTS + "test_ratios_are_of_our_speed_to_theirs"),
    ("attention counts what the causal mask hides", GPU, "attention = 2 * shape", "attention = 4 * shape", TESTS + "test_flops_are_those_that_torch_counts"),
    ("the output layer counts for every token", GPU, "2 * head * trained", "2 * head * float(lengths.sum())",
     TESTS + "test_flops_are_those_that_torch_counts"),
    ("a part that fails ends the measurement", GPU, "except Exception as error:", "except KeyboardInterrupt as error:",
     TESTS + "test_a_part_that_fails_or_does_not_fit_leaves_the_others"),
    ("a part is started without time for it", GPU, "if needs > left:", "if left < 0:",
     TESTS + "test_a_part_that_fails_or_does_not_fit_leaves_the_others"),
    ("a step's bar is full whatever its stages took", PICTURE, 'max(0.0, step["seconds"] - sum(stages.values()))', "0.0",
     TESTS + "test_bars_are_as_long_as_the_seconds_they_stand_for"),
    ("each side's bar is a share of itself", PICTURE, "taken / max(sides.values())", "taken / taken",
     TESTS + "test_bars_are_as_long_as_the_seconds_they_stand_for"),
    ("the first step counts twice", STARTUP, "end - step - imported", "end - imported",
     TESTS + "test_the_seconds_to_the_first_step_are_all_accounted_for"),
]  # fmt: skip
