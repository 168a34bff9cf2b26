"""A MONAI app on volumes that it draws: as a Flower app, and with train.py and job.py as an NVFlare job."""
