"""The same training as the script of an NVFlare job: two lines are fedaudit's."""

import nvflare.client as flare
from monai_app.task import Net, load_data, test, train

from fedaudit.adapters.nvflare import watch  # 1

flare.init()
loader, validation = load_data(int(flare.get_site_name()[-1]), batch_size=2)
while flare.is_running():
    net = Net()
    net.load_state_dict(flare.receive().params)
    with watch():  # 2
        train(net, loader, epochs=1, learning_rate=0.1)
    loss, dice = test(net, validation)
    flare.send(flare.FLModel(params=net.state_dict(), metrics={"loss": loss, "dice": dice}))
