"""The table of recipes, the rules and the page agree; Megatron Bridge is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.recipes import Recipe, Settings, models, page, recipes
from megatron_vocabpar.megatron_lm.layouts import evened_out, model_chunks, written_out

TAG, READ = recipes()
BY_NAME = {recipe.name: recipe for recipe in READ}


def test_the_page_is_what_the_rules_say() -> None:
    written = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text("utf-8")
    assert "\n".join(models()) in written
    accepted = sum(not recipe.problems for recipe in READ)
    assert f"{accepted} of {len(READ)} are accepted" in " ".join(written.split())
    assert len([line for line in page() if line.startswith("| `")]) > len(READ)


def test_recipes_of_every_kind_are_there() -> None:
    assert TAG == "v0.6.0"
    assert len(READ) == len(BY_NAME) > 173
    assert all(recipe.arguments.pipeline_model_parallel_size > 1 for recipe in READ)
    assert not any(recipe.unread for recipe in READ)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("llama31_405b_pretrain_1024gpu_h100_bf16", ""),
        ("deepseek_v3_pretrain_1024gpu_h100_fp8cs", ""),
        ("deepseek_v3_pretrain_128gpu_vr200_fp8mx", "full_iteration"),
        ("deepseek_v3_pretrain_128gpu_vr200_fp8mx", "--moe-paged-stash"),
        ("llama3_70b_peft_8gpu_b200_bf16", ""),
        ("deepseek_v3_pretrain_256gpu_b200_fp8mx", ""),
    ],
)
def test_a_verdict_is_that_of_the_rules(name: str, problem: str) -> None:
    problems = BY_NAME[name].problems
    assert any(problem in line for line in problems) if problem else problems == []


def test_a_setting_that_the_file_lacks_is_no_default() -> None:
    recipe = Recipe("new", Settings(pipeline_model_parallel_size=2), (), None)
    with pytest.raises(LookupError, match="write that again"):
        assert recipe.problems


def test_layouts_made_by_hand_fill_their_stages() -> None:
    layouts = [recipe for recipe in READ if recipe.arguments.pipeline_model_parallel_layout]
    assert len(layouts) > 24
    for recipe in layouts:
        stages = written_out(recipe.arguments).split("|")
        stated = recipe.arguments.num_virtual_stages_per_pipeline_rank or 1
        assert set("".join(stages)) <= set("EtmL"), recipe.name
        assert sum(stage.count("t") for stage in stages) == recipe.arguments.num_layers, recipe.name
        assert model_chunks(recipe.arguments) == stated or recipe.bridge_says, recipe.name


@pytest.mark.parametrize(
    ("layout", "layers", "even"),
    [
        ("Ett|tttt|tttt|ttL", [2, 4, 4, 2], "Ettt|ttt|ttt|tttL"),
        ("Et*2|(t*2|)*2,t*3|tL", [2, 2, 2, 3, 1], "Ett|tt|tt|tt|ttL"),
        ("Et*4|(t*7|)*2t*8|tmL", [4, 7, 7, 8, 1], "Etttttt|tttttt|tttttt|ttttt|ttttmL"),
        ("Et|(tt|)*2mL", [1, 2, 2, 0], None),
        ("Et|t|tm|tL", [1, 1, 1, 1], None),
    ],
)
def test_what_a_layout_would_be_without_the_vocabulary(
    layout: str, layers: list[int], even: str | None
) -> None:
    args = Settings(pipeline_model_parallel_layout=layout)
    assert [stage.count("t") for stage in written_out(args).split("|")] == layers
    assert evened_out(args) == even
