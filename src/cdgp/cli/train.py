"""``cdgp train``: from good images, and defective ones if any, to a detector and its report."""

from cdgp.cli import options
from cdgp.cli.common import bars, build_settings, handle_errors, hint_at_gpu, parse_size, show_run


@handle_errors
def train(
    data: options.Data,
    out_folder: options.RunFolder,
    preset: options.Preset = None,
    input_size: options.InputSize = None,
    tile: options.Tile = False,
    seed: options.Seed = None,
    max_false_rejects: options.MaxFalseRejects = None,
    defect_rate: options.DefectRate = None,
    weights: options.Weights = None,
    good: options.Good = None,
    defective: options.Defective = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
    devices: options.Devices = 1,
    precision: options.Precision = None,
    save_maps: options.SaveMaps = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Train on good images, and on defective ones as far as there are any.

    Good images alone give a detector whose score is one minus a p-value; with defective images of
    two parts or more it is a probability.

    Examples:

      cdgp train parts --out runs/parts

      cdgp train parts/manifest.csv --out runs/parts --input-size 384x160 --seed 1

      cdgp train parts --out runs/strict --max-false-rejects 0.02

      cdgp train parts --out runs/line --defect-rate 0.02

      cdgp train parts --out runs/parts --resume
    """
    given = {
        "input_size": parse_size(input_size) if input_size is not None else None,
        "tile": True if tile else None,
        "seed": seed,
        "decision.max_false_rejects": max_false_rejects,
        "decision.defect_rate": defect_rate,
        "calibration.pictures": "held_out" if max_false_rejects is not None else None,
        "backbone.weights": weights,
        "data.good": good,
        "data.defective": defective,
        "training.precision": precision,
    }
    settings = build_settings(preset, config, assignments or [], given)
    hint_at_gpu(preset, config)
    from cdgp.workflows import train_run

    show_run(
        train_run(
            data, out_folder, settings, save_maps=save_maps, resume=resume, overwrite=overwrite,
            devices=devices, progress=bars(quiet),
        )
    )  # fmt: skip
