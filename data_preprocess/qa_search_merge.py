"""Merge Search-R1's question-answering data sets into train.parquet and test.parquet.

python data_preprocess/qa_search_merge.py --local_save_dir ~/data/qa_search
    [--local_dataset_path FOLDER] [--train_sources nq,hotpotqa]
    [--test_sources nq,triviaqa,popqa,hotpotqa,2wikimultihopqa,musique,bamboogle]

FOLDER contains a folder for each data set with {train,dev,test}.jsonl (FlashRAG, NQ-open) or .json
(HotpotQA). If a data set has no test split, its dev split is used, else its train split.
"""

from verlite.data.qa import main

TRAIN = ["nq", "hotpotqa"]
TEST = ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]

if __name__ == "__main__":
    main(__doc__, "~/data/qa_search", train=TRAIN, test=TEST, choose=True)
