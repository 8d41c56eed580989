"""Bugs to plant in the loop's stages, the step's end and the roles: (name, file, old text, new text, test)."""

STAGES, FINISH, SETUP, SYNC = (f"verlite/trainer/{name}.py" for name in ("stages", "finish", "setup", "sync"))
BATCH, EVALUATION, TRAINING, ACTOR = (
    "verlite/trainer/batch.py", "verlite/trainer/evaluation.py", "verlite/workers/training.py", "verlite/workers/actor.py",
)  # fmt: skip
GAP, WEIGHTS = "verlite/algorithms/gap.py", "verlite/protocol/weights.py"
STAGE, RUNS, OBJECTIVES = "tests/trainer/test_stages.py::test_", "tests/trainer/test_runs.py::test_", "tests/workers/test_objectives.py"
GAPS, ROLES, VALIDATION = "tests/algorithms/test_gap.py", "tests/workers/test_training.py", "tests/trainer/test_evaluation.py"
BUCKETS = "tests/protocol/test_weights.py"

MUTANTS = [
    ("warm-up without a critic", STAGES, "run.step >= run.plan.critic_warmup", "run.step >= run.config.trainer.critic_warmup",
     STAGE + "the_policy_waits_for_the_critics_warm_up_which_only_a_critic_has"),
    ("a failed greedy answer counts 0", STAGES, "strict=True) if ok}", "strict=True)}", STAGE + "a_failed_greedy_answer_is_no_baseline_of_0"),
    ("a row without a vote is trained on", STAGES, 'response_mask=batch.batch["response_mask"] * valid[:, None]',
     'response_mask=batch.batch["response_mask"]', STAGE + "a_failed_reward_takes_its_row_out_and_too_many_stop_the_run"),
    ("failed rewards never stop a run", STAGES, "    if rate > limit:\n        raise RewardFailures", "    if False:\n        raise RewardFailures",
     STAGE + "a_failed_reward_takes_its_row_out_and_too_many_stop_the_run"),
    ("failed samples never stop a run", STAGES, "if (rate := failed.double().mean().item()) > limit:",
     "if (rate := failed.double().mean().item()) > 1:", STAGE + "too_many_failed_samples_stop_the_run"),
    ("the gate lets everything through", STAGES, '    if gate and not gap["training/log_prob_gap"] <= limit:', "    if False:",
     STAGE + "the_start_up_gate_says_where_the_gap_is"),
    ("the gate takes nothing for a match", STAGES, "    if gate and not gap:\n", "    if False:\n", STAGE + "the_start_up_gate_says_where_the_gap_is"),
    ("the first step of a process learns from other numbers", STAGES, "return batch if once else measured", "return measured",
     STAGE + "the_start_up_gate_measures_and_where_log_probs_are_skipped_hides_them_from_the_update"),
    ("only the last chunk's failures are told", STAGES, 'first_error = first_error or batch.meta_info["reward_first_error"]',
     'first_error = batch.meta_info["reward_first_error"]', STAGE + "validation_tells_of_failures_in_any_chunk_and_shows_samples"),
    ("validation without scores passes", STAGES, "if failed == len(rewards):", "if False:", STAGE + "validation_without_any_score_is_no_validation"),
    ("the reference follows the policy", STAGES, 'rewards, t["old_log_probs"], t["ref_log_prob"],', 'rewards, t["old_log_probs"], t["old_log_probs"],',
     RUNS + "two_devices_learn_what_one_does"),
    ("answers come back in the order of the ranks", "verlite/controller/dispatch.py", "position[np.concatenate(rows)] = np.arange", "position[:] = np.arange",
     STAGE + "rows_stay_whole_on_their_way_to_the_ranks_and_back"),
    ("a mini-batch without votes hides the others", TRAINING, "{key: None for step in steps for key in step}", "steps[0]", ROLES),
    ("means count mini-batches that have no such metric", TRAINING, "sum(values) / len(values)", "sum(values) / len(steps)", ROLES),
    ("a full disk kills the worker", TRAINING, "except OSError as error:", "except ZeroDivisionError as error:", ROLES),
    ("a refused save passes for a good one", FINISH, "raise OSError(refused)", "pass", RUNS + "a_save_that_the_disk_refuses_costs_a_warning"),
    ("a late stop saves nothing", SETUP, "        if run.step > run.saved_step:  # the request came after the step had looked for one\n            save(run)\n", "",
     RUNS + "a_stop_that_comes_after_the_step_is_saved_all_the_same"),
    ("a killed run's last line is lost", SETUP, "        if checkpoint:\n            finish_metrics(run_dir, state)\n", "",
     RUNS + "a_kill_between_checkpoint_and_metrics_loses_neither_the_line_nor_the_export"),
    ("a killed run's export is lost", SETUP, ' and (not trainer.export_hf or exported_step(run_dir) == state["step"])', "", RUNS + "a_kill_between_checkpoint_and_metrics_loses_neither_the_line_nor_the_export"),
    ("the export hides why a sync failed", SYNC, "    run.rollout.load_weights(exported, run.version + 1)\n",
     "    try:\n        run.rollout.load_weights(exported, run.version + 1)\n    finally:\n        run.actor.release_export()\n",
     RUNS + "a_sync_that_does_nothing_is_caught_and_leaves_nothing"),
    ("no entropy where nobody has measured it", ACTOR, ' or "old_log_probs" not in batch.batch.keys()', "",
     RUNS + "a_killed_run_resumes_to_the_numbers_of_one_that_was_not"),
    ("no gap where nobody has measured it", ACTOR, 'metrics |= gap_sums(log_probs, rows["rollout_log_probs"], mask)', "pass", OBJECTIVES),
    ("the largest gap is a sum", GAP, '{name}": values.max() if values.numel() else values.sum()', '{name}": values.sum()', GAPS),
    ("the gap counts what the mask hides", GAP, "chosen = mask.bool()", "chosen = torch.ones_like(mask).bool()", GAPS),
    ("the correlation is a covariance", GAP, "/ spread**0.5 if spread > 0", "if spread > 0", GAPS),
    ("the rarest answer wins", EVALUATION, "counts.argmax(1)", "counts.argmin(1)", VALIDATION),
    ("balance is that of the plain order", BATCH, "int(lengths[rows].sum()) for rows in assignment", "int(part.sum()) for part in lengths.tensor_split(len(assignment))",
     "tests/trainer/test_batch.py"),
    ("a failed export keeps its memory", WEIGHTS, "    except BaseException:\n        buckets.close()\n        raise\n", "    except ZeroDivisionError:\n        raise\n",
     BUCKETS),
]  # fmt: skip
