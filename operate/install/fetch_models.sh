# Fetches tokenizers of models from a hub into a folder, before a picker starts: $1 is the folder, $2 names the models,
# [NAME=]MODEL[@REVISION] with commas between, $3 is the file for failures. Ends well whatever happens: a picker asks the
# pods of a model without a folder. FOLDER/NAME is a link to FOLDER/.fetched/MODEL@REVISION, which is whole or not there.
set -uf
umask 002 # pickers of one group share the folder
ulimit -d 400000 # KiB, below the container's limit: an answer too large ends one fetch, not the container
folder=$1 failures=$3

tokenizer_files() { # REPOSITORY REVISION INTO: never weights, never code
    timeout 100 hf download "$1" --revision "$2" --local-dir "$3" --quiet \
        --include tokenizer.json --include tokenizer.model --include tokenizer_config.json \
        --include special_tokens_map.json --include added_tokens.json --include vocab.json --include merges.txt \
        --include vocab.txt --include spiece.model --include sentencepiece.bpe.model \
        --include chat_template.jinja --include chat_template.json --include 'additional_chat_templates/*.jinja' \
        --include config.json --include generation_config.json --include preprocessor_config.json \
        --include processor_config.json --include config_sentence_transformers.json \
        --include tekken.json --include params.json --include 'tokenizer.model.v*' || return
    timeout 20 hf cache verify "$1" --revision "$2" --local-dir "$3" || return
    if [ -e "$3/tekken.json" ] && { [ -e "$3/tokenizer.json" ] || [ -e "$3/tokenizer.model" ]; }; then
        # vLLM 0.32 goes by Mistral's files only beside weights of this name, a picker wherever it finds them
        weights=$(timeout 20 hf download "$1" --revision "$2" --dry-run --quiet \
            --include 'consolidated*.safetensors') || return
        [ -n "$weights" ] || find "$3" -maxdepth 1 \( -name tekken.json -o -name 'tokenizer.model.v*' \) -delete
    fi
    [ -n "$(find "$3" -name 'tokenizer.*' -o -name tekken.json)" ] || { echo "it has no tokenizer" && return 1; }
    rm -rf "$3/.cache" # of hf
    chmod 775 "$3"
}

fetch() { # [NAME=]MODEL[@REVISION]
    source=${1#*=} name=${1%%=*}
    repository=${source%%@*} name=${name%%@*} revision=main
    [ "$source" = "$repository" ] || revision=${source#*@}
    whole=$folder/.fetched/$repository@$revision
    mkdir -p "${whole%/*}" "$(dirname "$folder/$name")" || return
    if [ ! -d "$whole" ]; then
        new=$(mktemp -d "$folder/.new.XXXXXX") || return
        tokenizer_files "$repository" "$revision" "$new" && mv -T "$new" "$whole" 2>/dev/null
        rm -rf "$new" # of a failure, or of a picker slower than another one
    fi
    [ -d "$whole" ] || return
    link=$(mktemp -u "$(dirname "$folder/$name")/.link.XXXXXX")
    ln -sr "$whole" "$link" && mv -T "$link" "$folder/$name" || { rm -f "$link" && return 1; }
}

IFS=,
for model in $2; do
    if said=$(fetch "$model" 2>&1); then
        echo "fetched $model"
    else
        echo "failed $model: $said" | tail -c 1000 | tee -a "$failures"
    fi
done
find "$folder" -maxdepth 1 -name '.new.*' -mmin +60 -exec rm -rf {} +
