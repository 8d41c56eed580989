"""Bugs in what single methods add to the loop, its configuration and its recipes: (name, file, old text, new text, test)."""

STREAM, STREAMS = "verlite/rewards/stream.py", "tests/rewards/test_stream.py::test_"
ADVANTAGES = "verlite/algorithms/advantages.py"
BY_ROW = "tests/trainer/test_agent.py::test_estimators_that_need_no_tokens_say_the_same_without_them"
TOKENS = "tests/trainer/test_agent.py::test_an_observation_is_as_if_it_had_never_been"
STAGES, ACTOR, LOOP = (f"verlite/{name}.py" for name in ("trainer/stages", "workers/actor", "trainer/ppo"))
PLAN, RULES, SETTINGS, INEFFECTIVE = (f"verlite/config/{name}.py" for name in ("plan", "rules", "correction", "ineffective"))
REWARD_CONTRACT, MODEL = "verlite/rewards/contract.py", "verlite/engine/model.py"

STAGE = "tests/trainer/test_stages.py::test_"
SHAPED = STAGE + "scores_are_normalised_clipped_and_penalised_for_length_and_the_raw_ones_kept"
KEPT = STAGE + "dynamic_sampling_keeps_prompts_whose_samples_differ_until_the_step_is_full"
UNFILLED = STAGE + "dynamic_sampling_that_never_fills_a_step_stops_the_run"
CORRECTED = STAGE + "correction_weighs_tokens"
REJECTED = STAGE + "rejected_tokens_leave_the_loss_but_not_the_baseline"
TRUNCATED = STAGE + "truncated_responses_count_in_the_baseline_and_nowhere_else"
CHOSEN = STAGE + "tokens_of_high_covariance_are_chosen_over_the_whole_step"
BYPASS = STAGE + "in_bypass_mode_the_rollouts_log_probs_are_the_old_ones_and_the_gate_still_measures"
OWN_IDS = STAGE + "the_prompts_of_a_step_have_ids_and_seeds_of_their_own_over_generations"
SCORER = "tests/rewards/test_scorer.py::test_"
OBJECTIVE = "tests/workers/test_objectives.py::test_"
WRONG = "tests/config/test_rules.py::test_wrong_lines"
ASKED = "tests/config/test_plan.py::test_old_log_probs_are_computed_where_somebody_asks"
RECIPE = "tests/recipes/test_methods.py::test_a_recipe_is_its_method"
CONTRACT = "tests/rewards/test_contract.py::test_what_is_wrong_is_said_once"

MUTANTS = [
    # rewards beside generation
    ("reward functions run in the worker's folder", "verlite/rewards/scorer.py", "folder=self._folder)", "folder=None)",
     SCORER + "functions_run_in_the_folder_that_is_named_where_there_is_such_a_one"),
    ("a folder of another machine ends reward functions", "verlite/rewards/scorer.py", "folder if folder and Path(folder).is_dir() else None", "folder",
     SCORER + "functions_run_in_the_folder_that_is_named_where_there_is_such_a_one"),
    ("every engine takes all cores for rewards", "verlite/rewards/scorer.py", "share=self._share, ", "",
     SCORER + "engines_of_one_machine_share_its_cores"),
    ("arrays in object columns weigh nothing", "verlite/protocol/data.py", " + sum(array.nbytes for array in arrays)", "",
     "tests/protocol/test_data.py::test_bytes_count_tensors_and_arrays_in_object_columns"),
    ("the fastest worker's wait for rewards is told", STAGES, '["reward_seconds"].max()', '["reward_seconds"].min()',
     STAGE + "the_wait_for_rewards_is_the_slowest_workers"),
    ("the wait for rewards is measured before it", "verlite/workers/rollout.py",
     "            results = rewards.results()\n            waited = time.monotonic() - began\n",
     "            waited = time.monotonic() - began\n            results = rewards.results()\n",
     "tests/workers/test_weights_and_samples.py::test_the_wait_for_the_last_rewards_is_told"),
    ("a complete run starts Ray", "verlite/trainer/begin.py", "if nothing_to_do or find(", "if find(",
     "tests/trainer/test_runs.py::test_a_killed_run_resumes_to_the_numbers_of_one_that_was_not[one_update_a_step]"),
    # scores
    ("scores are not normalised", STAGES, "reward.mean, reward.std, None if", "0.0, 1.0, None if", SHAPED),
    ("the score is clipped before rloo_token_kl's baseline", STAGES, "None if after_baseline else reward.clip_range", "reward.clip_range",
     STAGE + "rloo_token_kl_clips_after_the_baseline_and_everything_else_the_score"),
    ("the penalty counts the prompt", STAGES, 'overlong_penalty(t["response_length"]', 'overlong_penalty(t["response_length"] + t["prompt_length"]', SHAPED),
    ("the penalty is forgotten", STAGES, "scores, batch = scores + penalty, batch", "scores, batch = scores, batch", SHAPED),
    ("raw scores are the shaped ones", STAGES, "return batch.with_batch(scores=scores", "return batch.with_batch(raw_scores=scores, scores=scores", SHAPED),
    # dynamic sampling
    ("prompts without a signal are kept", STAGES, "kept = more.select_idxs(rows_with_signal", "kept = more or more.select_idxs(rows_with_signal", KEPT),
    ("a step is overfull", STAGES, "joined = joined[: plan.rows].with_meta", "joined = joined.with_meta", KEPT),
    ("engines sleep between the generations of a step", STAGES, "sleep_after=not run.plan.filters_groups", "sleep_after=True",
     STAGE + "engines_stay_awake_until_the_last_generation_of_a_step"),
    ("engines never sleep after dynamic sampling", STAGES, "    if len(joined) == plan.rows:\n        _sleep(run)\n", "",
     STAGE + "engines_stay_awake_until_the_last_generation_of_a_step"),
    ("only the last generation counts", STAGES, "for part in (batch, kept) if len(part)", "for part in (kept,) if len(part)", KEPT),
    ("shares are those of the last generation", STAGES, "run.metrics[key] = before + (value - before) / draws", "run.metrics[key] = value", KEPT),
    ("sampling never stops", STAGES, "len(joined) < plan.rows and draws >= limit", "False", UNFILLED),
    ("one generation too many", STAGES, "draws >= limit", "draws > limit", UNFILLED),
    ("the filter looks at the wrong number", STAGES, "torch.tensor([part[name] if ok else 0.0", "torch.tensor([0.0 if ok else 0.0",
     STAGE + "dynamic_sampling_by_what_the_reward_function_says"),
    ("every step filters", STAGES, "    if not run.plan.filters_groups:\n", "    if False:\n",
     STAGE + "without_dynamic_sampling_a_step_is_one_generation"),
    ("generations of a step share uids", STAGES, 'f"{run.step}-{run.drawn + i}"', 'f"{run.step}-{i}"', OWN_IDS),
    ("generations of a step share seeds", STAGES, "run.step, run.drawn, len(wanted)", "run.step, 0, len(wanted)", OWN_IDS),
    # rollout correction
    ("the weights do not reach the update", ACTOR, 'rollout_is_weights=rows.get("rollout_is_weights")', "rollout_is_weights=None",
     OBJECTIVE + "importance_weights_and_chosen_tokens_reach_the_loss"),
    ("the chosen tokens do not reach the update", ACTOR, 'extra | {"selected": rows.get("selected_tokens")}', 'extra | {"selected": None}',
     OBJECTIVE + "importance_weights_and_chosen_tokens_reach_the_loss"),
    ("rejected tokens stay", "verlite/protocol/ragged.py", 'mask = mask * ~tokens["rejected_tokens"]', "pass", REJECTED),
    ("rejected responses have no vote", STAGES, "batch = batch.with_batch(rejected=rejected.sum(1))",
     'batch = batch.with_batch(rejected=rejected.sum(1) * 0, trained_tokens=t["trained_tokens"] - rejected.sum(1))', REJECTED),
    ("weights are thrown away", STAGES, "return batch if weights is None else batch.with_non_tensor(rollout_is_weights=ragged(weights, lengths))", "return batch", CORRECTED),
    ("bypass mode measures old log-probs", STAGES, "if run.plan.correction.bypass_mode:", "if False:", BYPASS),
    ("bypass mode skips the gate", STAGES, "    if not needed and not gate:\n", "    if not needed:\n", BYPASS),
    ("bypass mode keeps the loss", PLAN, "loss_mode=BYPASS_LOSS if corrected.bypass_mode else", "loss_mode=",
     "tests/config/test_plan.py::test_bypass_mode_brings_its_loss_and_saves_the_pass"),
    ("bypass mode computes old log-probs all the same", PLAN, "    if corrected.bypass_mode:\n        return False\n", "",
     "tests/config/test_plan.py::test_bypass_mode_brings_its_loss_and_saves_the_pass"),
    ("a preset is ignored", SETTINGS, "    if config.preset is not None:\n", "    if False:\n",
     "tests/config/test_plan.py::test_presets_and_their_keys_are_the_same"),
    ("old log-probs are skipped although a correction needs them", PLAN, " or corrected.acts_on_batch", "", ASKED),
    ("old log-probs are skipped although tokens are chosen by them", PLAN, " or loss in SELECTORS", "", ASKED),
    ("old log-probs are skipped although the estimator needs them", PLAN, " or loss in SELECTORS or asked", " or loss in SELECTORS", ASKED),
    ("old log-probs are skipped with KL in the reward", PLAN, " or config.algorithm.use_kl_in_reward or", " or", ASKED),
    # truncated responses, chosen tokens
    ("truncated responses are trained", STAGES, "tokens = tokens.masked_fill(truncated, 0)", "tokens = tokens * 1", TRUNCATED),
    ("finished responses are taken for truncated ones", STAGES, '["status"] == Status.LENGTH', '["status"] == Status.DONE', TRUNCATED),
    ("a row's number where tokens have their own", ADVANTAGES, 'OUTCOME_ESTIMATORS = frozenset({"grpo",', 'OUTCOME_ESTIMATORS = frozenset({"opo", "grpo",', BY_ROW),
    ("tokens that have no vote are in the means", STAGES, 'here(batch, "rejected_tokens")["response_mask"]', 'torch.ones_like(adv)', TOKENS),
    ("tokens are chosen with another step's lot", STAGES, "torch.Generator().manual_seed(seed)", "None", CHOSEN),
    ("no tokens are chosen", STAGES, "    if run.plan.loss_mode not in SELECTORS:\n", "    if True:\n", CHOSEN),
    ("sum of squared probabilities without the temperature", MODEL, "sum_pi_squared(hidden, embedding.weight, temperature)",
     "sum_pi_squared(hidden, embedding.weight)", "tests/engine/test_passes.py::test_sum_of_squared_probabilities_by_the_oracle"),
    # rules and recipes
    ("dynamic sampling of single samples passes", RULES, "        rule = \"one sample never differs from itself", "        return\n        rule = \"one sample never differs from itself", WRONG),
    ("a step that cannot be filled passes", RULES, "if 0 < limit * drawn < prompts", "if 0 < limit * drawn < 0", WRONG),
    ("an adaptive KL from 0 passes", RULES, 'kl.type == "adaptive" and kl.kl_coef == 0', "False", WRONG),
    ("a clip range the wrong way round passes", RULES, "len(bounds) != 2 or bounds[0] >= bounds[1]", "len(bounds) != 2", WRONG),
    ("a preset beside its own keys passes", RULES, "if section.preset is not None and others:", "if False:", WRONG),
    ("a band without 1 passes", RULES, "if not low <= 1 <= high:", "if False:", WRONG),
    ("more prompts than there are pass", RULES, "if usable < data.train_batch_size:", "if False:", WRONG),
    ("a metric that no built-in scorer returns passes", RULES, 'groups.metric not in (None, "score", "acc", "seq_reward", "seq_final_reward")', "False", WRONG),
    ("cispo is held to PPO's clip", RULES, "low > 1 and loss in RATIO_CLIPPED", "low > 1", "tests/config/test_rules.py::test_settings_that_only_look_wrong"),
    ("a dual clip where there is none", RULES, 'c <= 1 + high and loss == "vanilla"', "c <= 1 + high", "tests/config/test_rules.py::test_settings_that_only_look_wrong"),
    ("a function that is not there passes", RULES, "        if file is None:\n            yield Problem(key, value, f\"there is no module", "        if False:\n            yield Problem(key, value, f\"there is no module",
     "tests/config/test_rules.py::test_own_functions_are_legal_names_where_they_exist"),
    ("a loss beside the bypass mode's passes", RULES, 'settings.bypass_mode and loss != "vanilla"', "False", WRONG),
    ("two KL terms are not said", INEFFECTIVE, "    if algorithm.use_kl_in_reward and actor.use_kl_loss:\n", "    if False:\n",
     "tests/config/test_ineffective.py::test_remarks_on_settings_that_are_rarely_meant"),
    ("dapo without clip-higher", "conf/dapo.yaml", "clip_ratio_high: 0.28", "clip_ratio_high: 0.2", RECIPE),
    ("dr_grpo divides by the standard deviation", "conf/dr_grpo.yaml", "norm_adv_by_std_in_grpo: false", "norm_adv_by_std_in_grpo: true", RECIPE),
    ("gspo with GRPO's loss", "conf/gspo.yaml", "loss_mode: gspo", "loss_mode: vanilla", RECIPE),
    # the contract of rewards
    ("chance passes for a score", REWARD_CONTRACT, "if (one.score, one.parts) != (two.score, two.parts)", "if False", CONTRACT),
    ("a constant passes for a score", REWARD_CONTRACT, "if best <= wrong:", "if best < wrong:", CONTRACT),
    ("extra_info is taken for granted", REWARD_CONTRACT, "zip(names, bare, strict=True) if result.score is None", "zip(names, bare, strict=True) if False", CONTRACT),
    # rewards beside generation
    ("the last rewards have the time of two steps", STREAM, "min(self._timeout_s, self._ends - time.monotonic())", "self._timeout_s",
     STREAMS + "what_is_left_at_the_end_has_the_time_of_one_step"),
    ("samples are scored one by one", STREAM, "while not self._queue.empty():", "while False:", STREAMS + "each_batch_is_what_has_come_since_the_one_before"),
    ("a failed generation leaves a thread", STREAM, "        self._queue.put(None)\n        self._thread", "        self._thread", STREAMS + "a_generation_that_fails_leaves_no_thread"),
    # the loop as a whole
    ("advantages with the sign turned", STAGES, "batch = batch.with_batch(advantages=adv, returns=returns)",
     "batch = batch.with_batch(advantages=-adv, returns=returns)", "tests/trainer/test_golden.py"),
    ("the critic is updated twice", LOOP, "        update_critic(run, batch)\n", "        update_critic(run, batch)\n        update_critic(run, batch)\n",
     "tests/trainer/test_golden.py"),
]  # fmt: skip
