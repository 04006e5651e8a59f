{{- define "picker.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* 50, so that every suffix that the templates add still fits a name of 63. */ -}}
{{- define "picker.fullname" -}}
{{- $name := include "picker.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "picker.selectorLabels" -}}
app.kubernetes.io/name: {{ include "picker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* On the pod that serves: what the Service selects by. */ -}}
{{- define "picker.leaderLabel" -}}
picker.dev/leader: "true"
{{- end -}}

{{- define "picker.labels" -}}
{{ include "picker.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: endpoint-picker
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* metadata of an object: (list root name) */ -}}
{{- define "picker.metadata" -}}
{{- $root := index . 0 -}}
metadata:
  name: {{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "picker.labels" $root | nindent 4 }}
{{- end -}}

{{- define "picker.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "picker.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "picker.poolName" -}}
{{- .Values.inferencePool.name | default .Release.Name -}}
{{- end -}}

{{- /* The headless Service of the engines, for proxies that route to a Service. */ -}}
{{- define "picker.enginesName" -}}
{{- include "picker.fullname" . }}-engines
{{- end -}}

{{- define "picker.policyConfigMap" -}}
{{- .Values.policyConfigMap | default (printf "%s-policy" (include "picker.fullname" .)) -}}
{{- end -}}

{{- define "picker.gatewayNamespace" -}}
{{- .Values.gateway.namespace | default .Release.Namespace -}}
{{- end -}}

{{- /* An image reference: (dict "image" .Values.image "tag" "default tag") */ -}}
{{- define "picker.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end -}}

{{- /* The Lease that replicas contend for: one for each pool. */ -}}
{{- define "picker.leaseName" -}}
picker-{{ include "picker.poolName" . }}
{{- end -}}
