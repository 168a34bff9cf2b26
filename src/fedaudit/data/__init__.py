"""Data: embedded real photographs and tables, data sets from local files, and how a federation partitions them."""

# The imported modules fill the catalogue; the order is the order in which the data sets are listed.
from fedaudit.data import photos, embedded  # noqa: F401, I001
from fedaudit.data import local_images, tables, image_folder, arrays, example_folder  # noqa: F401
from fedaudit.data.catalogue import (
    DATA_DIR_VARIABLE,
    DATASETS,
    Layout,
    Request,
    add_dataset,
    find_dataset,
    how_to_get,
    load_dataset,
    reading_once,
)
from fedaudit.data.dataset import Attribute, Dataset, Split
from fedaudit.data.example_folder import Examples, folder_data, read_folder
from fedaudit.data.own import from_frame, pairs_of
from fedaudit.data.table_file import table_file

__all__ = [
    "DATASETS",
    "DATA_DIR_VARIABLE",
    "Attribute",
    "Dataset",
    "Examples",
    "Layout",
    "Request",
    "Split",
    "add_dataset",
    "find_dataset",
    "folder_data",
    "from_frame",
    "how_to_get",
    "load_dataset",
    "pairs_of",
    "read_folder",
    "reading_once",
    "table_file",
]
