import pytest

from verlite.config.commands import PPO
from verlite.config.explain import explain


def test_explain_key():
    text = explain("actor_rollout_ref.actor.loss_agg_mode")
    assert "text; default token-mean" in text
    assert "How token losses are aggregated" in text
    assert "Legal: token-mean, token-sum" in text
    assert "must be given" in explain("data.train_files")
    assert "Legal: >= 1 or -1" in explain("data.train_max_samples")
    assert "Older names: data.train_data_num" in explain("data.train_max_samples")


def test_explain_accepts_end_of_key():
    text = explain("optim.lr")
    assert "actor_rollout_ref.actor.optim.lr" in text and "critic.optim.lr" in text
    assert explain("adv_estimator") == explain("algorithm.adv_estimator")


def test_explain_section_lists_keys():
    assert "actor_rollout_ref.actor.optim.lr " in explain("actor_rollout_ref.actor.optim")
    assert "trainer" in explain() and "The training loop" in explain()


def test_explain_old_names():
    assert "is now called data.shuffle" in explain("data.shuffle_train_dataloader")
    assert "is now called actor_rollout_ref.rollout.n" in explain("n_agent")
    assert "counts all devices" in explain("actor_rollout_ref.actor.ppo_micro_batch_size")
    assert "only fsdp or fsdp2 is accepted" in explain("actor_rollout_ref.actor.strategy")
    assert "without effect" in explain("trainer.rollout_data_dir")
    assert "refused" in explain("actor_rollout_ref.actor.megatron.x")
    assert "an entry of actor_rollout_ref.rollout.engine_kwargs" in explain(
        "actor_rollout_ref.rollout.engine_kwargs.vllm.x"
    )


def test_explain_suggests_similar_key():
    with pytest.raises(KeyError, match=r"Did you mean data\.train_batch_size"):
        explain("data.train_batchsize")


def test_every_key_has_help_and_legal_default():
    from verlite.config import Config
    from verlite.config.rules import declared

    for key in PPO.keys.values():
        assert key.doc, f"{key.name} has no help"
        assert explain(key.name)
    config = Config()
    assert [
        p.key for p in [*declared.names(config, PPO.keys), *declared.numbers(config, PPO.keys)]
    ] == []


def test_help_texts_are_sentences():
    for key in PPO.keys.values():
        first = key.facts.help.split()[0]
        assert key.facts.help.endswith("."), key.name
        assert first not in ("and", "or", "they", "those"), key.name


def test_explain_says_when_a_key_is_used():
    text = explain("clip_cov_ub")
    assert "upper bound of the covariance" in text
    assert f"Used only with {ACTOR}policy_loss.loss_mode=clip_cov or your own function." in text
    text = explain("critic.optim.num_cycles")
    assert "Used only when the run has a critic and with critic.optim.lr_scheduler_type" in text
    assert "Never used: the reference has no optimizer." in explain(
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload"
    )


ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    "typed, found",
    [
        ("learning_rate", "actor_rollout_ref.actor.optim.lr "),
        ("learning rate", "actor_rollout_ref.actor.optim.lr "),
        ("lora", "actor_rollout_ref.model.lora_rank"),
        ("wandb", "trainer.logger"),
    ],
)
def test_words_find_the_keys_about_them(typed, found):
    text = explain(typed)
    assert text.startswith(f"No key is called {typed}. Keys about it:\n")
    assert found in text
    assert "data.shuffle" not in text


@pytest.mark.parametrize(
    ("word", "found"),
    [("kl", "algorithm.use_kl_in_reward"), ("entropy", "actor_rollout_ref.actor.entropy_coeff")],
)
def test_a_word_of_many_names_is_not_a_detectors_key(word, found):
    text = explain(word)
    assert found in text.split("\n\n")[0]
    assert not text.startswith("trainer.detect")


@pytest.mark.parametrize("typed", ["--data.seed=1", "+data.seed=1", "data.seed=1", " data.seed "])
def test_an_override_is_explained_like_its_key(typed):
    assert explain(typed) == explain("data.seed")


def test_words_that_no_key_has():
    with pytest.raises(KeyError, match="zebra: unknown key"):
        explain("zebra")
