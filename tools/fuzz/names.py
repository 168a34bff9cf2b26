"""The targets' names, without what they import."""

NAMES = [
    *(
        "scenario",
        "setting",
        "plugin",
        "yaml",
        "study",
        "flags",
        "resolve",
        "index",
        "transcript",
        "recording",
        "canaries",
        "arrays",
        "columns",
        "frame",
        "tokens",
        "text",
        "task",
    ),
    *("pickle", "idx", "idx.gz", "npz", "mat", "csv", "parquet", "picture", "own-arrays", "booster"),
    *("example-folder", "boosters", "job", "parts", "tensors", "adapters"),
    *("wfdb", "nifti", "nifti.gz", "dicom"),
    *("safetensors", "pt", "kept", "finding", "generator", "store", "site", "statement", "result"),
]
