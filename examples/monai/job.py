"""The NVFlare job, in the simulator; four lines are fedaudit's."""

from monai_app.task import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from fedaudit.adapters.nvflare import RecorderFilter  # 3

if __name__ == "__main__":
    recipe = FedAvgRecipe(name="monai", model=Net(), min_clients=2, num_rounds=2, train_script="train.py")
    record = RecorderFilter("/tmp/recordings")  # 4
    recipe.add_client_input_filter(record, tasks=["train"])  # 5
    recipe.add_client_output_filter(record, tasks=["train"])  # 6
    recipe.execute(SimEnv(num_clients=2, num_threads=2, workspace_root="/tmp/simulation"))
