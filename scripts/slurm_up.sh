#!/usr/bin/env bash
# A real Slurm of three small nodes on this one machine, for trying job scripts and for scripts/slurm_test.sh.
#   scripts/slurm_up.sh start [--install]     --install: bring Debian's packages where they are missing
#   scripts/slurm_up.sh status | stop
# Afterwards: export SLURM_CONF=$FASTDECODE_SLURM_DIR/slurm.conf; srun -N3 -n3 --mpi=pmi2 ...   (Open MPI: --mpi=pmix)
# As root, without systemd and without accounting (no sacct). Everything it writes is in one folder; it starts a munge of its
# own, and stop ends what start started, by process id.
#   FASTDECODE_SLURM_DIR=/tmp/fastdecode-slurm  NODES=3  CPUS=4 (of a node, whatever the machine has)  PORT=16817
set -euo pipefail

dir=${FASTDECODE_SLURM_DIR:-/tmp/fastdecode-slurm}
nodes=${NODES:-3} cpus=${CPUS:-4} port=${PORT:-16817}
host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

say() { echo "slurm_up: $*"; }
fail() { echo "slurm_up: $*" >&2; exit 2; }
alive() { local pid; pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; }

stop() {
  local file left
  if [ ! -e "$SLURM_CONF" ] && [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
    fail "$dir has files that are not a Slurm's of this script; name another folder by FASTDECODE_SLURM_DIR"
  fi
  for file in "$dir"/slurmd.*.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
    if alive "$file"; then kill "$(cat "$file")" || true; fi
  done
  for _ in $(seq 100); do
    left=0
    for file in "$dir"/*.pid; do if alive "$file"; then left=1; fi; done
    [ $left = 0 ] && break
    sleep 0.1
  done
  [ "${left:-0}" = 0 ] || fail "some of its processes don't end: $(cat "$dir"/*.pid | tr '\n' ' ')"
  rm -rf "$dir"
}

need_packages() {
  local missing=""
  for program in slurmctld slurmd srun munged; do command -v $program >/dev/null || missing+=" $program"; done
  if [ -n "$missing" ]; then
    [ "${1:-}" = --install ] || fail "there is no$missing here; scripts/slurm_up.sh start --install brings them (Debian)"
    say "installing slurm-wlm, munge and libpmix2"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge libpmix2 >/dev/null
  fi
  # Slurm's PMIx plugin opens the name without a version, which only libpmix-dev, with its many dependencies, would bring.
  local pmix=/usr/lib/x86_64-linux-gnu/pmix2/lib
  if [ "${1:-}" = --install ] && [ -e $pmix/libpmix.so.2 ] && [ ! -e $pmix/libpmix.so ]; then ln -s libpmix.so.2 $pmix/libpmix.so; fi
}

start_munge() {
  (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" --num-threads=2 2>>"$dir/munged.log"
}

write_configuration() {
  # Names of slurmd's folders hold the node's, so that PMIx servers of several nodes on one machine don't collide.
  cat >"$SLURM_CONF" <<CONF
ClusterName=fastdecode
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
TmpFS=$dir/tmp.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=pmi2
KillWait=5
InactiveLimit=0
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,batch_sched_delay=0
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 101))-$((port + 100 + nodes))] CPUs=$cpus RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

is_ready() { [ "$(sinfo -h -N -o %T 2>/dev/null | grep -cE '^(idle|allocated|mixed|completing)$')" = "$nodes" ]; }

start() {
  [ "$(id -u)" = 0 ] || fail "slurmd needs root"
  need_packages "${1:-}"
  if alive "$dir/slurmctld.pid" && is_ready; then say "is up: export SLURM_CONF=$SLURM_CONF"; return; fi
  stop
  mkdir -p "$dir/state"
  chmod 755 "$dir"
  for i in $(seq "$nodes"); do mkdir -p "$dir/spool.n$i" "$dir/tmp.n$i"; done
  write_configuration
  start_munge
  slurmctld
  for i in $(seq "$nodes"); do slurmd -N "n$i"; done
  for _ in $(seq 150); do
    if is_ready; then say "is up: export SLURM_CONF=$SLURM_CONF"; return; fi
    sleep 0.2
  done
  tail -n 20 "$dir"/*.log >&2
  fail "the nodes don't answer"
}

case ${1:-} in
  start) start "${2:-}" ;;
  stop) stop; say "stopped" ;;
  status) sinfo -N -l ;;
  *) fail "say start [--install], status or stop" ;;
esac
