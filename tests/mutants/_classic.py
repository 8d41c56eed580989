"""Twenty bugs that RL trainers have had, and the mutants that plant them: bug -> (room, name) of each."""

CLASSIC: dict[str, list[tuple[str, str]]] = {
    "labels shifted by one": [
        ("engine", "labels are off by one"), ("engine", "hidden states are off by one"), ("algorithms", "labels are shifted by one"),
    ],
    "the micro-batch's own count as the denominator": [
        ("algorithms", "micro-batch's token count is the denominator"), ("engine", "counts are the micro-batch's"),
    ],
    "temperature dropped": [
        ("algorithms", "temperature is dropped"), ("engine", "the temperature is dropped"),
        ("engine", "the temperature is dropped in updates"), ("rollout", "temperature is forgotten"),
    ],
    "the mask includes the prompt": [("sft", "the loss is on prompts too"), ("trainer", "the mask marks prompts")],
    "the mask excludes the end token": [("trainer", "the last token of an answer is not trained"), ("sft", "no end token is learned")],
    "the reward on padding": [("algorithms", "the score lies on padding")],
    "the weight sync skipped": [("trainer", "the engines keep their old weights")],
    "the cache not reset after a sync": [("rollout", "caches are not reset after a sync"), ("rollout", "the prefix cache survives a sync")],
    "group ids swapped": [("algorithms", "groups by position"), ("algorithms", "all rows are one group")],
    "standard deviation over the batch": [("algorithms", "std over the batch")],
    "k3 with the sign turned": [("algorithms", "k3 with the wrong sign")],
    "gradients clipped in every micro-batch": [("engine", "clipping in every micro-batch")],
    "no position ids": [
        ("trainer", "positions count padding"),("engine", "padded positions count padding"), ("engine", "positions count across sequences")],
    "ids decoded and encoded again": [("rollout", "ids pass through text")],
    "tool text counted": [("rollout", "observations are trained"), ("engine", "tool text is trained")],
    "the learning rate's schedule advanced in every micro-batch": [
        ("engine", "the schedule goes once per micro-batch"), ("engine", "the schedule goes once per update"),
    ],
    "the reference updated": [
        ("trainer", "the reference is the actor"), ("trainer", "a resumed run's reference is the trained policy"),
        ("engine", "the reference has an optimizer"),
    ],
    "the advantage not detached": [
        ("algorithms", "the gradient reaches the advantages"), ("engine", "what the updates compare with carries a gradient"),
    ],
    "padded rows counted": [
        ("engine", "rows without a vote count as sequences"), ("algorithms", "current KL counts empty rows"),
    ],
    "the optimizer's state not restored": [("engine", "moments are not restored"), ("engine", "step counts are not restored")],
}  # fmt: skip
