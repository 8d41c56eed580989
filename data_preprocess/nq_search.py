"""Write Natural Questions (Kwiatkowski et al., 2019) in Search-R1's format, for the search agent.

python data_preprocess/nq_search.py --local_save_dir ~/data/nq_search [--local_dataset_path FOLDER]

FOLDER contains train.jsonl and test.jsonl. Writes train.parquet and test.parquet.
"""

from verlite.data.qa import main

if __name__ == "__main__":
    main(__doc__, "~/data/nq_search", train=["nq"], test=["nq"])
