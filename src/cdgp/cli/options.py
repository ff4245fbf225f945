"""Options and arguments of the commands, as annotated types."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Data = Annotated[
    Path,
    typer.Argument(
        help="Folder with good/ and defective/ (if any), or a CSV manifest (image,label,…)."
    ),
]
Model = Annotated[Path, typer.Argument(help="model.safetensors, or the folder of a run.")]
Images = Annotated[list[Path], typer.Argument(help="Images, or folders of images.")]
Places = Annotated[
    list[str],
    typer.Argument(help="Images, or folders of images; with --ray also lists and URLs."),
]
RunFolder = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
ResultsFolder = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
ResultsPlace = Annotated[
    str,
    typer.Option("--out", help="Folder for the results; with --ray also a URL.", metavar="PATH"),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder for scores, overlays and report.")
]
CheckFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder for check.json and check.html.")
]
Groups = Annotated[
    Path | None,
    typer.Option(help="CSV manifest to write, near duplicates in one group.", metavar="FILE"),
]
Good = Annotated[str | None, typer.Option(help="Name of the folder of good images.")]
Defective = Annotated[str | None, typer.Option(help="Name of the folder of defective images.")]
WhiteLevel = Annotated[
    int | None, typer.Option(help="The value that means white in 16-bit files; 65535.")
]
Pages = Annotated[
    Literal["single", "first"] | None,
    typer.Option(help="What a file of several pages is: refused (single), or its first page."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="lite (default), paper, or dino, which has not been measured.",
        metavar="lite|paper|dino",
    ),
]
InputSize = Annotated[
    str | None,
    typer.Option(
        help="Size that images are resized to; multiples of 16, of a transformer's patch (14 for "
        "dino).",
        metavar="HxW",
    ),
]
Tile = Annotated[
    bool,
    typer.Option(
        "--tile",
        help="Cut images into overlapping windows of --input-size at their own resolution, "
        "instead of resizing them to it; prediction then does the same.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of split and training.")]
MaxFalseRejects = Annotated[
    float | None,
    typer.Option(
        help="Largest share of good parts that may be rejected, for example 0.01; keeps the "
        "calibration images out of training."
    ),
]
DefectRate = Annotated[
    float | None,
    typer.Option(
        help="Share of the parts on the line that are defective, for example 0.02: what "
        "P(defective) refers to. No decision changes with it. Needs a model with defective images."
    ),
]
Weights = Annotated[
    str | None, typer.Option(help="Backbone weights: hub, bundled or a .safetensors file.")
]
Devices = Annotated[
    int,
    typer.Option(help="How many GPUs train, or processes where there is no GPU.", metavar="N"),
]
Precision = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="What the networks compute in while they train; float32 by default."),
]
Config = Annotated[
    Path | None, typer.Option(help="Settings: a TOML file, or the config.json of a run.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Change one setting.", metavar="KEY=VALUE")
]
Overlays = Annotated[
    Literal["all", "rejected", "none"] | None,
    typer.Option(
        help="Of which images overlays are written: all below 1,000 images, else the rejected "
        "ones, where nothing is said."
    ),
]
BestRuntime = Annotated[
    bool,
    typer.Option(
        help="Run the model in OpenVINO or onnxruntime where they are installed; it is exported "
        "beside the model once."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Images that are worked on at the same time; one a core by default."),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Images that each worker hands to the network at once; 1 by default."),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Score on Ray, into a Parquet file a shard: on the cluster at HOST:PORT, or where "
        "nothing follows, at RAY_ADDRESS or else on this machine.",
        metavar="[ADDRESS]",
    ),
]
Actors = Annotated[
    int | None,
    typer.Option(help="Worker processes on Ray; as many as there is room for by default."),
]
SaveMaps = Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")]
Resume = Annotated[bool, typer.Option(help="Go on with what is unfinished in --out.")]
Overwrite = Annotated[bool, typer.Option(help="Replace what an earlier call left in --out.")]
Strict = Annotated[bool, typer.Option(help="Warnings make the exit code 1.")]
Quiet = Annotated[bool, typer.Option(help="No progress bars.")]
