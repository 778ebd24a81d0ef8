#!/bin/sh
# Submit a file and follow the evaluation, with curl and jq:
#     sh follow.sh SERVER REPOSITORY COMMIT FILE

base=$1 key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')

# Send a request to the URL $1 until a usable response is in answer.json, at most 300 times.
request() {
    attempts=0
    while [ $((attempts += 1)) -le 300 ]; do
        status=$(curl -s -o answer.json -w '%{http_code}' "$@")
        case $?:$status in
        0:200) return ;;
        0:408 | 0:429 | 0:5* | [1-9]*) sleep 2 ;;
        *) jq -r .message answer.json >&2; break ;;
        esac
    done
    echo "gave up: $1" >&2
    exit 1
}

request "$base/evaluate" -H "Idempotency-Key: $key" \
    -F "repository[url]=$2" -F "commit_oid=$3" -F "submission[source]=@$4" \
    --form-string "evaluator_cmd=sh evaluator.sh"
id=$(jq -r .evaluation_id answer.json)

after=
while [ "$after" != null ]; do
    request "$base/evaluation/$id/events?wait=25&after=$after" --max-time 60
    jq -j '.data[] | if .type == "text" then .payload else "DATA \(.payload)\n" end' answer.json
    after=$(jq -r .end answer.json)
done
