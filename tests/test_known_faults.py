"""What strangers' networks, programs and bug reports showed, by kind, and the tests of each: they exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
AGREEMENT = "dgm_infer/conditioning/test_agreement.py"
OF_TORCH = "dgm_infer/conditioning/test_derivatives_of_torch.py"
KINKS = "dgm_infer/conditioning/test_kinks.py"
STATEMENTS = "dgm_infer/interop/test_statements.py"
PRIORS = "dgm_infer/interop/test_priors.py"
CONSTANTS = "dgm_infer/interop/test_constants.py"
CALLS = "test_bad_calls.py::test_a_mistyped_call_is_answered_in_one_line_that_names_it"
VALUES = "test_bad_calls.py::test_values_of_a_wrong_kind_are_refused_in_one_line_by_every_argument"
STRANGERS = "generators/test_strangers.py::test_the_posterior_of_a_network_is_that_of_quadrature"
REFUSED = "generators/test_strangers.py::test_a_network_that_cannot_be_conditioned_is_refused_in_one_line"
PROGRAMS = "dgm_infer/interop/test_public_programs.py"

FAULTS: dict[str, list[str]] = {
    # --------------------------------------------------------------------------------------------------------- calls
    "paths": [CALLS, "dgm_infer/runs/test_faults.py::test_paths_that_cannot_be_a_run_are_one_line"],
    "tensors of other kinds": [CALLS, VALUES],
    "sizes": [CALLS, "dgm_infer/test_arguments.py::test_what_is_wrong_is_refused_in_one_line"],
    "wrong kinds": [CALLS, VALUES],
    "masked arrays, and arrays that torch refuses": [
        CALLS,
        "dgm_infer/test_arguments.py::test_arrays_of_any_layout_are_data",
    ],
    "numbers that are not": [CALLS],
    "a covariance for its factor": [CALLS],
    "dependence on the batch": [
        "dgm_infer/sampling/test_verdict.py::test_a_model_that_branches_on_its_whole_batch_is_refused",
        "dgm_infer/test_probe.py::test_an_energy_that_depends_on_the_other_points_is_a_fault",
        f"{AGREEMENT}::test_other_ways_to_mix_rows_are_refused",
    ],
    "files": [
        "dgm_infer/test_files.py::test_arrays_that_do_not_fit_each_other_are_refused",
        "dgm_infer/test_files.py::test_an_archive_that_unpacks_to_more_than_there_is_is_refused_before_it_is_unpacked",
        "dgm_infer/test_files.py::test_draws_with_a_group_that_holds_itself_are_refused",
    ],
    "YAML": [
        "evaluation/commands/test_cli.py::test_a_value_that_yaml_reads_as_another_is_refused_with_its_line",
        "evaluation/commands/test_cli.py::test_a_configuration_that_is_not_text_is_refused",
    ],
    "context": [
        "dgm_infer/test_arguments.py::test_draws_do_not_depend_on_what_is_around_the_call",
        "dgm_infer/test_arguments.py::test_draws_on_a_fibre_do_not_depend_on_the_default_type",
        "dgm_infer/test_arguments.py::test_where_nothing_can_be_computed_is_said_in_one_line",
    ],
    "silent shortfall": ["dgm_infer/likelihood_free/test_likelihood_free.py::test_fewer_draws_than_asked_for_are_said"],
    "trust": ["dgm_infer/runs/test_store.py::test_no_file_makes_python_run_what_it_names"],
    "work that will not end": [
        "dgm_infer/test_progress.py::test_a_trajectory_that_will_not_end_is_said_before_the_first_transition",
        "dgm_infer/test_progress.py::test_a_trajectory_of_evidence_that_will_not_end_is_said_at_its_second_step",
    ],
    # --------------------------------------------------------------------------------------------------- silent answers
    "a derivative of another function": [
        f"{AGREEMENT}::test_a_stop_gradient_is_refused_by_condition",
        f"{AGREEMENT}::test_an_operator_with_another_derivative_is_refused",
        f"{AGREEMENT}::test_a_target_with_another_gradient_is_refused",
        f"{AGREEMENT}::test_one_output_of_many_is_refused",
        f"{AGREEMENT}::test_a_derivative_that_is_off_by_a_hundredth_is_refused",
        f"{AGREEMENT}::test_what_has_changed_without_a_count_of_versions_is_looked_at_again",
    ],
    "a decoder whose rows mix": [f"{AGREEMENT}::test_a_decoder_is_refused_as_a_fibre_is"],
    "wrong derivatives of torch": [
        f"{OF_TORCH}::test_a_wrong_forward_derivative_of_torch_is_refused_with_what_to_use",
        f"{OF_TORCH}::test_other_wrong_forward_derivatives_of_torch_are_refused",
        f"{AGREEMENT}::test_a_second_derivative_of_another_function_is_refused",
        f"{OF_TORCH}::test_gradients_of_energies_are_right_where_torch_differentiates_twice_wrongly",
    ],
    "mass where a bijection saturates": [
        f"{PRIORS}::test_the_evidence_of_successes_alone_counts_the_mass_beside_one",
        f"{PRIORS}::test_a_prior_integrates_to_one_in_its_coordinate",
        f"{PRIORS}::test_simplices_and_correlations_keep_their_mass",
        f"{PRIORS}::test_mass_that_no_coordinate_reaches_is_named_with_its_share",
    ],
    "unseen modes": [
        "dgm_infer/evidence/test_coverage.py::test_a_mode_that_is_far_from_a_narrow_base_is_looked_for_all_the_same",
        "dgm_infer/evidence/test_coverage.py::test_modes_are_looked_for_where_an_energy_has_more_bits_than_its_base",
    ],
    "a density on a circle": [
        f"{STATEMENTS}::test_a_fibre_stays_within_one_turn_and_has_its_posterior",
        f"{STATEMENTS}::test_the_evidence_with_an_angle_is_that_of_one_turn",
        f"{PRIORS}::test_functions_of_angles_stay_within_one_turn_and_integrate_to_one",
    ],
    "errors too small": [
        "dgm_infer/evidence/test_statistics.py::test_intervals_cover_the_truth_as_often_as_they_say",
        "dgm_infer/evidence/test_smc.py::test_intervals_cover_where_tails_are_heavier_than_those_of_a_narrow_base",
        "dgm_infer/evidence/tempering/test_path_sampling.py"
        "::test_a_problem_whose_chains_stay_at_one_end_leaves_those_of_the_others",
    ],
    "pictures read in another range": [
        "dgm_infer/conditioning/test_pictures.py::test_black_and_white_are_those_of_the_declared_range"
    ],
    "weights of the wrong network": [
        "generators/test_foreign_weights.py::test_one_of_two_networks_of_one_architecture_is_chosen_by_its_prefix",
        "generators/test_foreign_weights.py::test_a_network_without_a_prefix_and_its_average_with_one_are_told_apart",
    ],
    "values that are rounded with the density of others": [
        f"{STATEMENTS}::test_relaxed_variables_that_are_rounded_are_refused"
    ],
    # --------------------------------------------------------------------------------------------------- wrong reasons
    "two devices": [
        "evaluation/commands/test_processes.py::test_a_run_of_two_processes_ends_and_leaves_everything",
        "evaluation/commands/test_processes.py::test_every_kind_of_shipped_configuration_trains_in_two_processes_and_resumes",
    ],
    "no second derivative": [STRANGERS, REFUSED],
    "networks that do not copy": [STRANGERS, REFUSED],
    "16-bit islands": [STRANGERS, REFUSED],
    "constants taken for random": [f"{CONSTANTS}::test_constants_may_decide"],
    "branches in libraries": [f"{CONSTANTS}::test_solvers_that_choose_their_steps_name_one_with_fixed_steps"],
    "circular advice": [
        f"{STATEMENTS}::test_a_mixture_is_a_latent_variable_of_a_target",
        f"{STATEMENTS}::test_a_mixture_is_a_latent_variable_of_a_model",
        f"{PROGRAMS}::test_the_evidence_of_published_values_is_found",
    ],
    "data of lower dimension than their shape": [
        f"{STATEMENTS}::test_observations_on_a_surface_are_likelihoods",
        f"{STATEMENTS}::test_the_evidence_and_the_mean_of_data_on_a_surface_are_those_of_quadrature",
    ],
    "Delta statements": [
        f"{STATEMENTS}::test_an_observed_delta_is_an_exact_observation",
        f"{STATEMENTS}::test_a_delta_has_no_likelihood",
    ],
    "flat outputs": [
        f"{AGREEMENT}::test_flat_outputs_are_named_in_one_line",
        f"{STATEMENTS}::test_censored_values_are_events_with_a_probability",
    ],
    "kinks": [
        f"{KINKS}::test_models_with_kinks_take_no_more_evaluations_than_smooth_ones",
        f"{KINKS}::test_the_operation_its_layer_and_its_line_are_named",
        "dgm_infer/sampling/test_plateau.py::test_steps_grow_again_as_far_as_that_costs_little_acceptance",
    ],
    "retracing": [f"{PROGRAMS}::test_the_density_of_a_program_is_that_of_pyro"],
    "labels, lists": [
        "generators/test_modules.py"
        "::test_a_label_of_numpy_is_one_of_torch_and_one_that_is_no_integer_is_told_what_to_write",
        "generators/test_modules.py::test_an_argument_that_is_a_list_of_noises_is_fixed_or_has_an_input_for_each",
        "evaluation/commands/test_train.py::test_a_metric_that_nobody_logs_is_named_before_the_work",
    ],
    "evidence of a uniform kernel": [
        "dgm_infer/evidence/test_start.py::test_the_evidence_of_a_uniform_kernel_names_what_can_estimate_it"
    ],
    "energies and outputs that leave torch": [
        f"{AGREEMENT}::test_an_energy_that_leaves_torch_is_named_wherever_gradients_are_needed",
        f"{OF_TORCH}::test_outputs_without_usable_derivatives_have_their_own_remedy",
        f"{OF_TORCH}::test_what_torch_cannot_differentiate_in_batches_is_named",
    ],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_fault_has_tests_that_exist(kind):
    for test in FAULTS[kind]:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test
