# Batch program of a stage: a step for the first node, which runs the stage, and one for the others,
# which train along. It writes `status` when it ends. Before this text stand the values: folder,
# grace, first, other, srun_options.
others=$((SLURM_JOB_NUM_NODES - 1))
job=$SLURM_JOB_ID
reason=
rest_code=0
silent=false

[ -d "$folder" ] || exit 143
exec >"$folder/slurm.out" 2>&1

write_status() {
    local code=$?
    printf '{"code": %d, "others": %d, "reason": "%s", "silent": %s}\n' \
        "$code" "$rest_code" "$reason" "$silent" > "$folder/status.new" &&
        mv "$folder/status.new" "$folder/status"
}
trap write_status EXIT
# A plain scancel also reaches this program; Slurm ends the steps by itself.
trap : TERM
set_up

# The supervisor takes the end of its stdin for the orchestrator's death, and a step's stdin is at
# its end unless that of srun stays open. This program holds it open for as long as it lives.
fifo=$(mktemp -u)
mkfifo "$fifo"
exec 3<> "$fifo"
rm "$fifo"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK-}

step() { # NODES RELATIVE STDOUT STDERR COMMAND...
    srun --export=ALL --nodes="$1" --ntasks="$1" --relative="$2" --wait=0 --kill-on-bad-exit=0 \
        --output="$3" --error="$4" "${srun_options[@]}" "${@:5}" <&3 &
}

# SIGTERM goes to the steps alone; srun itself would kill its step, saved or not.
ended_since=
end_steps() { # REASON
    [ -z "$ended_since" ] || return 0
    reason=$1
    ended_since=$SECONDS
    scancel --signal=TERM "$job"
}

[ ! -e "$folder/stop" ] || exit 143
step 1 0 "$folder/events" "$folder/log" "${first[@]}"
main=$!
rest=
[ "$others" = 0 ] || {
    step "$others" 1 "$folder/others" "$folder/others" "${other[@]}"
    rest=$!
}

rest_failed=
patience=5
while kill -0 "$main" 2>/dev/null; do
    sleep 0.5
    [ ! -e "$folder/stop" ] || end_steps asked
    # A job whose number was lost: another one computes this.
    [ -d "$folder" ] || [ ! -d "${folder%/*}" ] || end_steps asked
    if [ -n "$rest" ] && ! kill -0 "$rest" 2>/dev/null; then
        wait "$rest" || rest_code=$? rest_failed=$SECONDS
        # Others that were asked to end have ended: the first node is still saving.
        [ "$rest_code" != 143 ] || patience=$grace
        rest=
    fi
    # The first node's program has noticed by then, unless it is stuck.
    [ -z "$rest_failed" ] || [ $((SECONDS - rest_failed)) -lt "$patience" ] || end_steps node
    # Supervisors have killed their stages by then, unless they are stuck.
    if [ -n "$ended_since" ] && [ $((SECONDS - ended_since)) -ge $((grace + 10)) ]; then
        scancel --signal=KILL "$job"
        ended_since=$SECONDS
    fi
done
wait "$main"
code=$?
for ((i = 0; i < 2 * grace; i++)); do
    { [ -n "$rest" ] && kill -0 "$rest" 2>/dev/null; } || break
    sleep 0.5
done
# One that can be killed has not ended by itself: a node that is gone does not end its part.
[ -z "$rest" ] || { kill "$rest" 2>/dev/null && silent=true; } || wait "$rest" || rest_code=$?
exit "$code"
