{{- /* Facts that follow from the values. Booleans are the text "true" or nothing. */ -}}

{{- define "picker.provider" -}}
{{- ternary "standalone" .Values.gateway.provider (eq .Values.mode "standalone") -}}
{{- end -}}

{{- define "picker.leaderElection" -}}
{{- $set := .Values.leaderElection.enabled -}}
{{- if kindIs "invalid" $set }}{{ if gt (int .Values.replicas) 1 }}true{{ end }}{{ else if $set }}true{{ end -}}
{{- end -}}

{{- define "picker.disruptionBudget" -}}
{{- $set := .Values.podDisruptionBudget.enabled -}}
{{- if kindIs "invalid" $set }}{{ if gt (int .Values.replicas) 1 }}true{{ end }}{{ else if $set }}true{{ end -}}
{{- end -}}

{{- define "picker.tlsMode" -}}
{{- $plain := has (include "picker.provider" .) (list "standalone" "envoy-gateway") -}}
{{- ternary (ternary "off" "self-signed" $plain) .Values.tls.mode (eq .Values.tls.mode "auto") -}}
{{- end -}}

{{- /* The longest wait that Picker's own configuration allows, in whole seconds; "unbounded" if it sets no bound. */ -}}
{{- define "picker.longestWait" -}}
{{- $default := 60 -}}
{{- if hasKey (.Values.settings.queue | default dict) "max_wait" }}{{ $default = .Values.settings.queue.max_wait }}{{ end -}}
{{- $waits := list -}}
{{- $profiles := concat (list .Values.policy) (values (.Values.policy.models | default dict)) -}}
{{- range $profiles -}}
{{- range .policy_classes | default list -}}
{{- $waits = append $waits (default $default .max_queue_wait) -}}
{{- end -}}
{{- end -}}
{{- if not $waits }}{{ $waits = list $default }}{{ end -}}
{{- $longest := 0 -}}
{{- $unbounded := false -}}
{{- range $waits -}}
{{- if kindIs "invalid" . }}{{ $unbounded = true }}{{ else }}{{ $longest = max $longest (ceil .) }}{{ end -}}
{{- end -}}
{{- ternary "unbounded" (toString (int $longest)) $unbounded -}}
{{- end -}}

{{- /* Seconds that a request may be held, for every proxy timeout below. */ -}}
{{- define "picker.queueWait" -}}
{{- $longest := include "picker.longestWait" . -}}
{{- $set := .Values.timeouts.queueWait -}}
{{- if kindIs "invalid" $set -}}
{{- if eq $longest "unbounded" -}}
{{- fail "policy or settings.queue.max_wait lets requests wait for ever: set timeouts.queueWait to the seconds after which the proxy may give up" -}}
{{- end -}}
{{- $longest -}}
{{- else -}}
{{- if and (ne $longest "unbounded") (lt (int $set) (int $longest)) -}}
{{- fail (printf "timeouts.queueWait is %v s, but policy or settings.queue.max_wait lets a request wait %s s: the proxy would give up on requests that Picker still holds" $set $longest) -}}
{{- end -}}
{{- int $set -}}
{{- end -}}
{{- end -}}

{{- /* Longest silence on a client's stream: held in the queue, then a response that comes in one piece. */ -}}
{{- define "picker.streamIdle" -}}
{{- add (include "picker.queueWait" .) .Values.timeouts.response 60 -}}
{{- end -}}

{{- /* The timeout of one ext_proc message. Not armed in full duplex, but not to be a trap for whoever changes the mode.
Envoy takes at most an hour. */ -}}
{{- define "picker.messageTimeout" -}}
{{- min 3600 (int (include "picker.streamIdle" .)) -}}s
{{- end -}}

{{- /* Picker's settings file: what follows from the values, with .Values.settings on top. */ -}}
{{- define "picker.settings" -}}
{{- $tls := dict "mode" (include "picker.tlsMode" .) -}}
{{- if eq $tls.mode "files" -}}
{{- $_ := set $tls "cert_file" "/etc/picker/tls/tls.crt" -}}
{{- $_ := set $tls "key_file" "/etc/picker/tls/tls.key" -}}
{{- end -}}
{{- if .Values.tls.clientCaConfigMap }}{{ $_ := set $tls "client_ca_file" "/etc/picker/client-ca/ca.crt" }}{{ end -}}
{{- $admin := dict "host" .Values.listenAddress "port" .Values.ports.admin "grpc_port" .Values.ports.introspection -}}
{{- if .Values.admin.tokenSecret }}{{ $_ := set $admin "token_file" (printf "/etc/picker/admin/%s" .Values.admin.tokenKey) }}{{ end -}}
{{- with .Values.admin.tokenReview }}{{ $_ := set $admin "token_review" (dict "names" .) }}{{ end -}}
{{- $kubernetes := dict "name" (include "picker.poolName" .) "namespace" .Release.Namespace -}}
{{- $_ := set $kubernetes "node_taints" .Values.nodeTaints -}}
{{- $_ := set $kubernetes "leader_election" (eq (include "picker.leaderElection" .) "true") -}}
{{- $policy := dict -}}
{{- if or .Values.policy .Values.policyConfigMap }}{{ $_ := set $policy "file" "/etc/picker/policy/policy.yaml" }}{{ end -}}
{{- $extproc := dict "host" .Values.listenAddress "tls" $tls -}}
{{- $_ := set $extproc "port" .Values.ports.extProc -}}
{{- $_ := set $extproc "health_port" .Values.ports.health -}}
{{- if .Values.shadow }}{{ $_ := set $extproc "shadow" true }}{{ end -}}
{{- $derived := dict "extproc" $extproc "admin" $admin "policy" $policy "pool" (dict "kubernetes" $kubernetes) -}}
{{- $_ := set $derived "queue" (dict "drain_grace" .Values.drainSeconds) -}}
{{- if eq .Values.mode "standalone" }}{{ $_ := set $derived.queue "drain_after_gateway" true }}{{ end -}}
{{- $_ := set $derived "log" (dict "format" "json") -}}
{{- toYaml (mergeOverwrite $derived (deepCopy .Values.settings)) -}}
{{- end -}}

{{- /* Picker's processes that the gateway talks to. */ -}}
{{- define "picker.workers" -}}
{{- dig "extproc" "workers" 1 .Values.settings -}}
{{- end -}}

{{- define "picker.podMounts" -}}
- {name: settings, mountPath: /etc/picker/settings, readOnly: true}
{{- if or .Values.policy .Values.policyConfigMap }}
- {name: policy, mountPath: /etc/picker/policy, readOnly: true}
{{- end }}
{{- if eq (include "picker.tlsMode" .) "files" }}
- {name: tls, mountPath: /etc/picker/tls, readOnly: true}
{{- end }}
{{- if .Values.tls.clientCaConfigMap }}
- {name: client-ca, mountPath: /etc/picker/client-ca, readOnly: true}
{{- end }}
{{- if .Values.admin.tokenSecret }}
- {name: admin-token, mountPath: /etc/picker/admin, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "picker.podVolumes" -}}
- name: settings
  configMap: {name: {{ include "picker.fullname" . }}-settings}
{{- if or .Values.policy .Values.policyConfigMap }}
- name: policy
  configMap: {name: {{ include "picker.policyConfigMap" . }}}
{{- end }}
{{- if eq (include "picker.tlsMode" .) "files" }}
- name: tls
  secret: {secretName: {{ required "tls.mode files needs tls.secretName" .Values.tls.secretName }}}
{{- end }}
{{- if .Values.tls.clientCaConfigMap }}
- name: client-ca
  configMap: {name: {{ .Values.tls.clientCaConfigMap }}}
{{- end }}
{{- if .Values.admin.tokenSecret }}
- name: admin-token
  secret: {secretName: {{ .Values.admin.tokenSecret }}}
{{- end }}
- name: tmp
  emptyDir: {}
{{- if eq .Values.mode "standalone" }}
- name: envoy
  configMap: {name: {{ include "picker.fullname" . }}-envoy}
{{- end }}
{{- end -}}

{{- define "picker.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
