import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.starting.process import thread_environment


def test_flags_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("RYZANSTEIN_GRPC_PORT", "6001")
    monkeypatch.setenv("RYZANSTEIN_NODE_ID", "node-e")
    settings = CliApp.run(WorkerSettings, ["--grpc-port", "6002", "--tp", "2"])
    assert (settings.grpc_port, settings.node_id, settings.tp) == (6002, "node-e", 2)


def test_a_model_is_called_like_its_directory_unless_named(tmp_path):
    assert ModelChoice.at(str(tmp_path / "llama")) == ModelChoice("llama", str(tmp_path / "llama"))
    assert ModelChoice.at(str(tmp_path / "llama"), "big").name == "big"


def test_ranks_share_the_cores_unless_configured_otherwise(monkeypatch):
    monkeypatch.setattr("ryzanstein.process.allotment.usable_cores", lambda: 8.0)
    assert WorkerSettings(tp=2).rank_spec("/m").threads == 4
    assert WorkerSettings(tp=64).rank_spec("/m").threads == 1
    assert WorkerSettings(tp=2, threads_per_rank=3).rank_spec("/m").threads == 3


def test_ranks_learn_how_long_to_spin_before_their_runtime_starts():
    spec = WorkerSettings(tp=2, threads_per_rank=3, tuning={"openmp_spins": 7}).rank_spec("/m")
    threads = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7"}
    assert thread_environment(spec) == threads
    assert "GOMP_SPINCOUNT" not in thread_environment(WorkerSettings().rank_spec("/m"))


def test_threads_that_own_less_than_a_core_by_a_quota_do_not_spin(monkeypatch):
    monkeypatch.setattr("ryzanstein.process.allotment.granted_cores", lambda: 1.5)
    alone, pair = (WorkerSettings(tp=tp, threads_per_rank=1, tuning={"openmp_spins": 7}).rank_spec("/m") for tp in (1, 2))
    assert (alone.spins, pair.spins) == (True, False)
    assert thread_environment(alone)["GOMP_SPINCOUNT"] == "7"
    assert thread_environment(pair)["GOMP_SPINCOUNT"] == "0"


def test_ranks_give_way_to_their_agent():
    assert WorkerSettings().rank_spec("/m").nice == 10
    assert WorkerSettings(tuning={"rank_nice": 0}).rank_spec("/m").nice == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": 0}, "tp"),
        ({"max_sequences": 513}, "every running sequence decodes"),
        ({"node_id": ""}, "node_id"),
        ({"collectives": "carrier pigeon"}, "collectives"),
        ({"max_waiting": 3}, "max_waiting"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        WorkerSettings(**wrong)


def test_further_models_and_templates_may_be_json_objects(monkeypatch):
    models, templates = '{"a,b": "/m/x,y", "c/d": "/m/=", "": "/m/last"}', '{"a,b": "/t/1,2.jinja", "": "/t/first"}'
    settings = CliApp.run(WorkerSettings, ["--model", "/m/first", "--more-models", models, "--chat-template", templates])
    assert settings.further_models() == [("a,b", "/m/x,y"), ("c/d", "/m/="), ("last", "/m/last")]
    assert str(settings.template_file("a,b")) == "/t/1,2.jinja"
    assert str(settings.template_file("first")) == "/t/first"
    monkeypatch.setenv("RYZANSTEIN_MORE_MODELS", models)
    assert WorkerSettings(model="/m/first").further_models() == settings.further_models()
    for wrong, message in (('{"a": 1}', "must have names and paths"), ('{"a": "/m", "a": "/n"}', "more than one model 'a'")):
        with pytest.raises(ValidationError, match=message):
            WorkerSettings(model="/m/first", more_models=wrong)


def test_a_directory_whose_name_is_too_long_needs_another_name():
    with pytest.raises(ValidationError, match="must have 1 to 128 characters, got 129: name it with model_name"):
        WorkerSettings(model="/m/" + "n" * 129)
    WorkerSettings(model="/m/" + "n" * 129, model_name="short")
