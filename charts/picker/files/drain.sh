# Stops Envoy gently: fails its readiness, closes its listeners as their clients go, and waits for the last request.
# Usage: drain.sh SECONDS [ADMIN_PORT]. Needs nothing but bash; the image has no curl.
deadline=$((SECONDS + $1))
port=${2:-9901}

ask() { # METHOD PATH: the answer of Envoy's admin port
    exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
    printf '%s %s HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
    exec 3>&-
}

active() { # requests in progress on the listener for clients
    local answer
    answer=$(ask GET '/stats?filter=^http\.inference\.downstream_rq_active$')
    [[ $answer =~ downstream_rq_active:\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}"
}

ask POST /healthcheck/fail >/dev/null
ask POST '/drain_listeners?graceful&skip_exit' >/dev/null
# Clients hear of it only after the endpoints have changed everywhere.
sleep 5
while ((SECONDS < deadline)) && [[ $(active) != 0 ]]; do sleep 1; done
