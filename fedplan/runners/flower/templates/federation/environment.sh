# What every process of the federation starts with. Each line turns off a call to the outside.

export FLWR_TELEMETRY_ENABLED=0 # Flower's reports of which commands are used
export FLWR_DISABLE_UPDATE_CHECK=1 # Flower's question whether there is a newer Flower
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 # Flower's installing of what an app asks for
export HF_HUB_OFFLINE=1 # downloads from the Hugging Face hub: models must be on this disk
export TRANSFORMERS_OFFLINE=1 # the same, of transformers
export HF_DATASETS_OFFLINE=1 # the same, of datasets
export HF_HUB_DISABLE_TELEMETRY=1 # the hub's reports of which libraries are used
export RAY_USAGE_STATS_ENABLED=0 # Ray's reports, if Ray is installed

# How many threads a site trains with is yours to say: export OMP_NUM_THREADS=4
