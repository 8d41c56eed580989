"""Natural Questions (Kwiatkowski et al., 2019) for the search agent, as train.parquet and test.parquet with Search-R1's rows.

python data_preprocess/nq_search.py --local_save_dir ~/data/nq_search [--local_dataset_path FOLDER_WITH_TRAIN_AND_TEST_JSONL]
"""

from verlite.data.qa import main

if __name__ == "__main__":
    main(__doc__, "~/data/nq_search", train=["nq"], test=["nq"])
