"""A driver script: ``python -m tests.ray_jobs.driver ADDRESS FOLDER STORAGE CONFIG``."""

import json
import sys

import ray

from tests.ray_jobs import jobs

if __name__ == "__main__":
    address, folder, storage, config = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    result = jobs.trainer(folder, storage=storage, **json.loads(config)).fit()
    print(json.dumps(result.return_value))  # noqa: T201
