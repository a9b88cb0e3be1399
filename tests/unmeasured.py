"""Tests during which coverage is not measured, since measuring doubles the time that Python takes.

They put many models, or whole programs, through code that other tests run, too. If that is no longer so, coverage is
below 100 percent, and `make test` fails. Only tests that take seconds are worth an entry.
"""

FOLDERS = ("tests/benchmarks/", "tests/docs/")

# By file.
TESTS = {
    "tests/basics/test_fishers.py": {
        "test_monte_carlo_fisher_converges_like_one_over_root_m",
        "test_monte_carlo_fisher_has_the_right_mean",
    },
    "tests/conformance/test_kit.py": {
        "test_other_forms_of_answers",
        "test_pytest_plugin",
    },
    "tests/influence/test_influence.py": {
        "test_operators_and_dampings",
    },
    "tests/influence/test_scores.py": {
        "test_batches_do_not_matter",
        "test_every_model",
    },
    "tests/kfac/test_checkpoint.py": {
        "test_killed_after_every_batch",
        "test_killed_at_random_moments",
    },
    "tests/kfac/test_definition.py": {
        "test_convolutions",
    },
    "tests/kfac/test_ekfac.py": {
        "test_one_position",
        "test_shared_positions",
    },
    "tests/kfac/test_experts.py": {
        "test_factors_are_those_of_layers",
        "test_one_datum",
    },
    "tests/kfac/test_hostile_models.py": {
        "test_inputs_that_all_data_share",
    },
    "tests/kfac/test_inspection.py": {
        "test_a_few_data_are_enough",
    },
    "tests/kfac/test_keyword_arguments.py": {
        "test_keyword_arguments_in_any_order",
        "test_positional_arguments",
    },
    "tests/kfac/test_operations.py": {
        "test_one_datum",
    },
    "tests/kfac/test_ownership.py": {
        "TestArrangements::test_batches",
        "TestArrangements::test_traces",
        "TestKnownModels::test_one_by_one",
    },
    "tests/kfac/test_parts.py": {
        "test_submatrices_keep_their_structure",
    },
    "tests/kfac/test_recurrent.py": {
        "test_factors",
    },
    "tests/kfac/test_repeated_tables.py": {
        "test_batches_as_long_as_the_table",
        "test_other_models",
    },
    "tests/kfac/test_replay.py": {
        "test_no_waiting",
    },
    "tests/kfac/test_single_datum.py": {
        "test_factors",
        "test_operators",
    },
    "tests/kfac/test_sparse_and_nested.py": {
        "test_operators_of_models_with_sparse_inputs",
    },
    "tests/laplace/test_posterior.py": {
        "test_covariance_of_outputs",
    },
    "tests/losses/test_losses.py": {
        "test_fisher_is_the_covariance_of_sampled_gradients",
    },
    "tests/merging/test_merge.py": {
        "test_exact_damping_is_a_dense_system",
    },
    "tests/operators/test_memory_of_products.py": {
        "test_predictions_are_multiplied_a_few_at_a_time",
    },
    "tests/operators/test_operators.py": {
        "test_batches_chunks_and_blocks",
        "test_curvature_is_the_definition",
        "test_jacobian_is_the_definition",
        "test_reused_graphs_give_the_same_products",
    },
    "tests/operators/test_recorded_products.py": {
        "TestSameProducts::test_all",
    },
    "tests/optim/test_beside_a_risk.py": {
        "test_neither_disturbs_the_other",
    },
    "tests/optim/test_empty_batches.py": {
        "test_an_empty_batch_changes_no_curvature",
    },
    "tests/optim/test_experts.py": {
        "test_steps_are_those_of_layers",
    },
    "tests/optim/test_integration.py": {
        "test_curvature_is_that_of_kfac",
    },
    "tests/optim/test_kfac.py": {
        "test_every_curvature_trains",
    },
    "tests/optim/test_outstanding.py": {
        "test_bad_gradients_at_every_place",
        "test_nothing_changes_if_all_is_well",
    },
    "tests/optim/test_recorded.py": {
        "test_recordings_change_nothing",
    },
    "tests/optim/test_safety.py": {
        "test_loss_never_rises",
    },
    "tests/optim/test_saving_unseen.py": {
        "test_saving_between_flag_and_reading",
    },
    "tests/optim/test_trajectory.py": {
        "test_resuming_after_every_step",
    },
    "tests/plots/test_synthetic.py": {
        "test_fisher",
    },
    "tests/test_readme.py": {
        "test_python_blocks_run_in_order",
    },
}


def is_unmeasured(nodeid: str) -> bool:
    """Return whether coverage is not measured during a test, given how pytest calls it."""
    file, _, name = nodeid.partition("::")
    return file.startswith(FOLDERS) or name.partition("[")[0] in TESTS.get(file, ())
